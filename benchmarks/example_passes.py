"""The example passes beside the default schedule, over gloo: memory, bytes on the wire, step time, exposed time.

    python -m benchmarks.example_passes                 over loopback, where the network is nearly free
    python -m benchmarks.example_passes --rate 1gbit    a network namespace a rank, links of that rate (needs root)

W processes of one thread hold one model for each variant, from the same seed, and take steps with one after the other,
round after round, so that what else the machine does falls on all alike. A step is forward and backward. Prints a table
and writes benchmarks/results/example_passes[_RATE].json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxshard
from benchmarks.machine import describe
from benchmarks.network import bytes_sent
from benchmarks.ranks import is_rank, join, launch
from examples.models import GPT, GPTConfig
from examples.passes import after
from examples.passes.keep_best_resident import KeepBestResident
from examples.passes.latest_safe_launch import LatestSafeLaunch
from fxshard.ir import Schedule, clock
from fxshard.ir.costs import COLLECTIVE_QUEUES, Costs
from fxshard.ir.nodes import info

W = 4
CONFIG = GPTConfig(layers=10, width=192, heads=4, vocabulary=1024, length=64)
BATCH = 4
RESULTS = Path(__file__).parent / "results"

Rates = tuple[float, float, float]
"""Bytes a second that operators touch; latency in seconds and bytes a second of a collective."""


@dataclass(frozen=True)
class Variant:
    """Options of compile, given the measured rates; `against` is the variant it is compared with."""

    options: Callable[[Rates], dict[str, Any]]
    against: str = "default"


def block_bytes() -> int:
    with torch.device("meta"):
        return sum(p.nbytes for p in GPT(CONFIG).blocks[0].parameters())


def keep(blocks: int) -> dict[str, Any]:
    return {"passes": after("keep-root-resident", KeepBestResident(int(1.01 * blocks * block_bytes())))}


DEEP: dict[str, Any] = {"forward_prefetch": 3, "backward_prefetch": 3, "rate_limit": 4}

VARIANTS = {
    "default": Variant(lambda rates: {}),
    "keep-best-resident, 3 of 10 blocks": Variant(lambda rates: keep(3)),
    "keep-best-resident, 6 of 10 blocks": Variant(lambda rates: keep(6)),
    "prefetch 3": Variant(lambda rates: DEEP),
    "prefetch 3, latest-safe-launch": Variant(
        lambda rates: {**DEEP, "passes": after("forward-overlap", LatestSafeLaunch(rates=rates))}, "prefetch 3"
    ),
}


@dataclass
class Measured:
    """What one rank saw of one variant; times in seconds, one a round."""

    seconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


# -- what each rank runs


def rank_main(rank: int, rounds: int, out: str) -> None:
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, CONFIG.length), generator=torch.Generator().manual_seed(rank))
    inputs = {"tokens": tokens, "targets": tokens}
    rates = measured_rates(inputs)
    models: dict[str, Any] = {}
    for name, variant in VARIANTS.items():
        models[name] = fxshard.compile(build(), **variant.options(rates))
        step(models[name], inputs)
    measured = {name: Measured() for name in VARIANTS}
    losses = set()
    for _ in range(rounds):
        for name, model in models.items():
            dist.barrier()
            sent, started = bytes_sent(), time.perf_counter()
            losses.add(step(model, inputs))
            measured[name].seconds.append(time.perf_counter() - started)
            measured[name].sent.append(bytes_sent() - sent)
    if len(losses) != 1:
        raise AssertionError(f"variants and rounds of one model on one batch gave several losses: {losses}")
    seen: list[Any] = [None] * W
    dist.all_gather_object(seen, measured)
    if rank == 0:
        report = {name: summary(name, models, seen, rates) for name in VARIANTS}
        Path(out).write_text(json.dumps({"rates": rates, "variants": report}))


def build() -> nn.Module:
    torch.manual_seed(0)
    return GPT(CONFIG)


def step(model: nn.Module, inputs: dict[str, Any]) -> float:
    loss = model(**inputs)
    loss.backward()
    model.zero_grad()
    return loss.item()


def measured_rates(inputs: dict[str, Any]) -> Rates:
    """Rank 0's, for all: the plain model's step while all ranks take one, and gathers of a byte and of a block."""
    plain = build()
    schedule = fxshard.trace(plain, inputs, W)
    touched = sum(sum(Costs("", 1.0, {}).works(segment)) for segment in segments(schedule))
    computing = median_seconds(lambda: step(plain, inputs))
    small, large = torch.zeros(1), torch.zeros(block_bytes() // 4 // W)
    latency = median_seconds(lambda: dist.all_gather(list(torch.empty(W, 1)), small))
    moving = median_seconds(lambda: dist.all_gather(list(torch.empty(W, large.numel())), large))
    rates = (touched / computing, latency, block_bytes() / max(moving - latency, 1e-6))
    shared: list[Any] = [tuple(float(f"{rate:.3g}") for rate in rates)]
    dist.broadcast_object_list(shared)
    return shared[0]


def segments(schedule: Schedule) -> list[list[Any]]:
    """Operators that follow each other, of both phases."""
    return [nodes for phase in schedule.phases for _, nodes in phase.steps() if info(nodes[0]).kind == "compute"]


def median_seconds(run: Callable[[], Any], times: int = 5) -> float:
    run()
    taken = []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def summary(name: str, models: dict[str, Any], seen: list[dict[str, Measured]], rates: Rates) -> dict[str, Any]:
    executor, schedule = models[name].__dict__["_fxshard"].executor, models[name].schedule
    compute, latency, rate = rates
    costs = Costs.linear(compute, dict.fromkeys(COLLECTIVE_QUEUES, (latency, rate)))
    times = clock.run(schedule, costs, ahead=False)
    slowest = {n: [max(m[n].seconds[r] for m in seen) for r in range(len(seen[0][n].seconds))] for n in VARIANTS}
    against = VARIANTS[name].against
    return {
        "arena_bytes": executor.arena.numel(),
        "resident_bytes": sum(buffer.nbytes for buffer in executor.residents.values()),
        "peak_gathered_bytes": schedule.memory.peak_gathered_bytes,
        "sent_bytes": max(int(statistics.median(m[name].sent)) for m in seen),
        "step_ms": 1e3 * statistics.median(slowest[name]),
        "against": against,
        "step_ratio": statistics.median(a / b for a, b in zip(slowest[name], slowest[against])),
        "clock_exposed_ms": sum(times.exposed.values()),
        "clock_step_ms": times.total,
    }


# -- the parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", help="limit links to this rate, as tc takes it (1gbit); default: loopback")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if is_rank():
        with join() as rank:
            rank_main(rank, arguments.rounds, arguments.out)
        return
    RESULTS.mkdir(exist_ok=True)
    out = RESULTS / f"example_passes{'_' + arguments.rate if arguments.rate else ''}.json"
    launch("benchmarks.example_passes", ["--out", str(out), *sys.argv[1:]], num_hosts=W, rate=arguments.rate)
    result = {
        "machine": describe(),
        "command": " ".join(["python", "-m", "benchmarks.example_passes", *sys.argv[1:]]),
        "world": {"W": W, "F": W, "backend": "gloo", "links": arguments.rate or "loopback"},
        "model": str(CONFIG),
        "batch": BATCH,
        "rounds": arguments.rounds,
        **json.loads(out.read_text()),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["variants"]))
    print(f"written to {out.relative_to(Path.cwd()) if out.is_relative_to(Path.cwd()) else out}")


def table(variants: dict[str, Any]) -> str:
    """The results as a Markdown table; memory and bytes a rank."""
    rows = [
        "| variant | arena + residents | peak gathered | sent a step | step | step ratio | exposed by the clock |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, v in variants.items():
        ratio = f"{v['step_ratio']:.2f} of {v['against']}" if v["against"] != name else ""
        rows.append(
            f"| {name} | {_mib(v['arena_bytes'] + v['resident_bytes'])} | {_mib(v['peak_gathered_bytes'])} "
            f"| {_mib(v['sent_bytes'])} | {v['step_ms']:.0f} ms | {ratio} | {v['clock_exposed_ms']:.0f} ms |"
        )
    return "\n".join(rows)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()
