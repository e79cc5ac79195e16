"""What merging small gathers buys over gloo: `python -m benchmarks.merge_small_gathers [--json FILE]`.

Four ranks on this machine train a chain of many small units, one thread each, in three ways, in the same processes, runs
of steps in turn: with the default options; with a rate limit and a prefetch wide enough for two buckets; and so with the
pass `examples.passes.merge_small_gathers`. Says the median step time of each, what merging gains round by round, and the
collectives and messages of a step. Cores are shared by the ranks, so times are of this machine and of this load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import fxshard
from benchmarks.machine import describe
from examples.passes.merge_small_gathers import MergeSmallGathers
from fxshard.ir import ops
from fxshard.ir.nodes import bytes_text, info

W = 4
UNITS = 32
MEMBERS = 8
ROUNDS = 7
STEPS = 6
WIDTHS = (16, 64, 256)
"""Of a unit's weight; a unit's gathered bytes are about 4 * width ** 2."""


class Chain(nn.Module):
    """UNITS linear layers with a residual, each an FSDP unit."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return x


MERGE = MergeSmallGathers(bucket_bytes=8 << 20, small_bytes=1 << 20, members=MEMBERS)
WIDE: dict[str, Any] = {"rate_limit": 2 * MEMBERS, "forward_prefetch": MEMBERS, "backward_prefetch": MEMBERS}
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "wide": WIDE,
    "wide, merged": {**WIDE, "passes": lambda passes: [*passes[:-2], MERGE, *passes[-2:]]},
}


def build(width: int, way: str) -> nn.Module:
    torch.manual_seed(0)
    return fxshard.compile(Chain(width), W, **WAYS[way])


def step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    model.zero_grad()
    return loss.detach()


def timed(model: nn.Module, x: Tensor) -> float:
    """Milliseconds a step, from when all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step(model, x)
    return (time.perf_counter() - start) / STEPS * 1e3


def messages(model: nn.Module, x: Tensor) -> int:
    """Messages this rank sends in a step."""
    group, sent = model.__dict__["_fxshard"].executor.world.shard_exchange, []
    post = group.post

    def counting(sends: Any, receives: Any) -> Any:
        sent.extend(sends)
        return post(sends, receives)

    group.post = counting
    step(model, x)
    del group.post
    return len(sent)


def measure(width: int) -> dict[str, Any]:
    """On one rank: all rounds at one width."""
    torch.compiler.reset()
    models = {way: build(width, way) for way in WAYS}
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = {name: [step(model, x) for _ in range(3)][-1] for name, model in models.items()}
    assert all(torch.equal(loss, losses["default"]) for loss in losses.values())
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(ROUNDS):
        for name in list(models) if turn % 2 else reversed(models):
            times[name].append(timed(models[name], x))
    result: dict[str, Any] = {"unit_bytes": models["wide"].schedule.flats["layers.1"].full_bytes}  # type: ignore[union-attr, index]
    for name, model in models.items():
        nodes = [info(n).kind for phase in model.schedule.phases for n in phase.graph.nodes]  # type: ignore[union-attr]
        result[name] = {
            "gathers": nodes.count("all_gather"),
            "collectives": sum(kind in ops.COLLECTIVES for kind in nodes),
            "messages": messages(model, x),
            "median_ms": statistics.median(times[name]),
            "fastest_ms": min(times[name]),
            "arena_bytes": model.schedule.memory.arena_bytes,  # type: ignore[union-attr]
        }
        ratios = sorted(own / merged for own, merged in zip(times[name], times["wide, merged"]))
        result[name]["merged_is_faster"] = [ratios[0], statistics.median(ratios), ratios[-1]]
    return result


def rank_main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=W)
    results = {width: measure(width) for width in WIDTHS}
    if rank == 0:
        Path(path, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file, and a table beside it (.md)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        mp.spawn(rank_main, (path,), nprocs=W)
        widths = json.loads(Path(path, "results.json").read_text())
    machine = describe()
    title = (
        f"{W} gloo ranks on {machine['cores']} cores ({machine['processor']}), {UNITS} units, buckets of at most {MEMBERS}; "
        f"torch {machine['torch']}, commit {machine['commit']}; medians of {ROUNDS} rounds of {STEPS} steps, in turn; "
        f"load average {os.getloadavg()[0]:.1f} at the end, {W} of it these ranks"
    )
    table = [
        "| a unit | way | gathers | collectives | messages a rank | arena | ms a step | merged is faster by (rounds) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in widths.values():
        for way in WAYS:
            one = result[way]
            least, median, most = one["merged_is_faster"]
            table.append(
                f"| {bytes_text(result['unit_bytes'])} | {way} | {one['gathers']} | {one['collectives']} | {one['messages']} "
                f"| {bytes_text(one['arena_bytes'])} | {one['median_ms']:.1f} | {median:.2f} ({least:.2f} to {most:.2f}) |"
            )
    print("\n".join([title, "", *table]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "widths": widths}, indent=2) + "\n")
        arguments.json.with_suffix(".md").write_text(
            "\n".join(["# Merging small gathers", "", title, "", *table]) + "\n"
        )


if __name__ == "__main__":
    main()
