"""A training step under fxshard, FSDP2, FSDP1, DDP and alone: one run, step about, ratios of medians first.

    python -m benchmarks.step --model gpt_512x6 --hosts 2 --rate 1gbit --systems fxshard,fsdp2,fsdp1,ddp --json FILE

Without --rate the hosts are this machine over loopback. With it each is a network namespace whose link has that rate both
ways, which needs root, ip and tc. Each rank has one thread and holds the model once for each system, from the same seed;
in each round every system takes one step (forward, backward, AdamW), in an order that turns with the round, so that what
else the machine does falls on all alike. The slowest rank counts. Beside them, of fxshard: `compute`, its step with
collectives that do nothing, and `communication`, its collectives with nothing between them; overlap efficiency is
max(compute, communication) / step, and exposed is how long the host waits in each collective. What an option of
`fxshard.compile` brings: `--systems fxshard,fxshard:rate_limit=3+forward_prefetch=2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.limits import CommunicationAlone, ComputeAlone, Exposed
from benchmarks.machine import describe
from benchmarks.network import bytes_sent
from benchmarks.ranks import is_rank, join, reported
from benchmarks.systems import Setting, Trainer, check
from examples import models

BATCH = {"gpt_512x6": 1, "gpt_768x12": 1, "resnet_small": 8, "encoder_decoder_small": 8, "gpt_demo": 2}
"""Sequences or images a rank and step: computing takes about half of what the link takes at 1 Gbit."""

WARM_UP = 2


def rank_main(given: argparse.Namespace) -> None:
    with join() as rank:
        report = measured(given, rank)
        if rank == 0:
            Path(given.json).write_text(json.dumps(report))


def measured(given: argparse.Namespace, rank: int) -> dict[str, Any]:
    make, make_inputs = models.get(given.model)
    setting = Setting(given.F or dist.get_world_size(), given.dtype == "bf16")
    inputs = make_inputs(batch_of(given), generator=torch.Generator().manual_seed(rank))
    trainers: dict[str, Any] = {}
    for name in given.systems:
        trainers[name] = Trainer(name, make, inputs, setting)
    if "fxshard" in trainers:
        trainers["compute"] = ComputeAlone(make, inputs, setting)
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(WARM_UP):
        for name, trainer in trainers.items():
            losses[name].append(trainer.step())
    if "fxshard" in trainers:
        trainers["communication"] = CommunicationAlone(trainers["fxshard"])
        losses["communication"] = []
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    sent: dict[str, list[int]] = {name: [] for name in trainers}
    names = list(trainers)
    for turn in range(given.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            before, started = bytes_sent(), time.perf_counter()
            losses[name].append(trainers[name].step())
            seconds[name].append(time.perf_counter() - started)
            sent[name].append(bytes_sent() - before)
    _check_losses({name: losses[name] for name in given.systems if name != "plain"}, 0.05 if setting.bf16 else 1e-3)
    exposed = _exposed(trainers["fxshard"], given.rounds) if "fxshard" in trainers else {}
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (seconds, sent, exposed))
    slowest = {name: [max(all_ranks) for all_ranks in zip(*(s[name] for s, _, _ in seen))] for name in trainers}
    return {
        **_summary(slowest),
        "sent_bytes": {name: max(int(statistics.median(s[name])) for _, s, _ in seen) for name in trainers},
        "exposed_s": {key: max(e[key] for _, _, e in seen) for key in exposed},
        "loss": {name: losses[name][-1] for name in given.systems},
        "parameters": sum(p.numel() for p in make(device="meta").parameters()),
    }


def _check_losses(losses: dict[str, list[float]], tolerance: float) -> None:
    """All systems do the same training, or what they take cannot be compared."""
    for step, values in enumerate(zip(*losses.values())):
        if max(values) - min(values) > tolerance * max(values):
            raise AssertionError(f"losses of step {step} differ: {dict(zip(losses, values))}")


def _exposed(trainer: Trainer, rounds: int) -> dict[str, float]:
    """Median seconds of waiting a step, by collective and FlatParameter."""
    exposed = Exposed(trainer.model)
    trainer.step()  # lowered anew
    exposed.seconds.clear()
    for program in _programs(trainer):
        program.unbind()
    trainer.step()
    exposed_steps = {key: len(values) for key, values in exposed.seconds.items()}
    for values in exposed.seconds.values():
        values.clear()
    for _ in range(rounds):
        dist.barrier()
        trainer.step()
    return {
        f"{kind} {flat}": statistics.median(_sums(exposed.seconds[kind, flat], exposed_steps[kind, flat]))
        for kind, flat in exposed_steps
    }


def _programs(trainer: Trainer) -> list[Any]:
    return list(trainer.model.__dict__["_fxshard"].executor.programs)


def _sums(values: list[float], each: int) -> list[float]:
    return [sum(values[i : i + each]) for i in range(0, len(values), each)]


def _summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios of medians, medians and quartiles of the slowest rank's seconds a step."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report: dict[str, Any] = {"ratios": {}}
    if "fxshard" in medians:
        others = [name for name in medians if name not in ("fxshard", "compute", "communication")]
        report["ratios"] = {f"fxshard/{name}": medians["fxshard"] / medians[name] for name in others}
        report["overlap_efficiency"] = max(medians["compute"], medians["communication"]) / medians["fxshard"]
    report["seconds"] = medians
    report["quartiles"] = {name: statistics.quantiles(values, n=4)[::2] for name, values in seconds.items()}
    report["all_seconds"] = seconds
    return report


def batch_of(given: argparse.Namespace) -> int:
    return given.batch or BATCH.get(given.model, 1)


# -- the command


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    setting_arguments(result, "fxshard,fsdp2,fsdp1,ddp,plain")
    result.add_argument("--hosts", type=int, default=2)
    result.add_argument("--ranks-per-host", type=int, default=1)
    result.add_argument("--rate", help="limit links to this rate, as tc takes it (1gbit, 200mbit); default: loopback")
    result.add_argument("--rounds", type=int, default=11)
    return result


def setting_arguments(to: argparse.ArgumentParser, default: str) -> None:
    """What is measured, of which systems, and where the results go."""
    to.add_argument("--model", default="gpt_512x6", choices=sorted(models.MODELS))
    to.add_argument("--batch", type=int, help="sequences or images a rank (default: by model)")
    to.add_argument("--F", type=int, help="sharding factor (default: all ranks)")
    to.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    to.add_argument("--systems", type=_systems, default=default)
    to.add_argument("--json", help="write the results to this file")


def _systems(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        try:
            check(name)
        except (ValueError, SyntaxError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return names


def main() -> None:
    arguments = sys.argv[1:]
    given = parser().parse_args(arguments)
    if is_rank():
        rank_main(given)
        return
    report = reported("benchmarks.step", arguments, given.hosts, given.ranks_per_host, given.rate)
    W = given.hosts * given.ranks_per_host
    result = {
        "ratios": report.pop("ratios"),
        "machine": describe(),
        "command": " ".join(["python", "-m", "benchmarks.step", *arguments]),
        "world": {
            "W": W,
            "F": given.F or W,
            "hosts": given.hosts,
            "backend": "gloo",
            "links": given.rate or "loopback",
        },
        "model": {
            "name": given.model,
            "parameters": report.pop("parameters"),
            "batch": batch_of(given),
            "dtype": given.dtype,
        },
        "rounds": given.rounds,
        **report,
    }
    print(table(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {given.json}")


def table(result: dict[str, Any]) -> str:
    """Ratios first, then seconds."""
    W = result["world"]
    lines = [
        f"{result['model']['name']} {result['model']['dtype']}, batch {result['model']['batch']} a rank, W={W['W']} F={W['F']} "
        f"on {W['hosts']} hosts, {W['links']}",
        "",
    ]
    width = max([24, *map(len, result["ratios"])])
    lines += [f"  {name:{width}} {ratio:6.3f}" for name, ratio in result["ratios"].items()]
    if "overlap_efficiency" in result:
        lines.append(f"  {'overlap efficiency':{width}} {result['overlap_efficiency']:6.3f}")
    width = max([16, *map(len, result["seconds"])])
    lines += ["", f"  {'ms a step':{width}} {'median':>8} {'quartiles':>17} {'MiB sent':>9}"]
    for name, seconds in result["seconds"].items():
        low, high = result["quartiles"][name]
        sent = result["sent_bytes"][name] / 2**20
        lines.append(f"  {name:{width}} {1e3 * seconds:8.1f} {1e3 * low:8.1f} {1e3 * high:8.1f} {sent:9.1f}")
    if result["exposed_s"]:
        lines += ["", f"  {'exposed ms':32} {1e3 * sum(result['exposed_s'].values()):8.1f}"]
        lines += [f"  {name:32} {1e3 * seconds:8.1f}" for name, seconds in result["exposed_s"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
