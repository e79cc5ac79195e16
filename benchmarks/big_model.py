"""A model that fits on no rank: 0.8 billion parameters, AdamW, built without memory, initialised, trained a step and saved.

    torchrun --nproc-per-node 4 -m benchmarks.big_model            F = W; rank 0 prints, and writes benchmarks/results/
    torchrun --nproc-per-node 4 -m benchmarks.big_model --ddp      the same under DDP, in the memory a rank may have

After each stage every rank says the most memory it held in it, as the kernel counts resident pages (VmHWM, which is set back
between stages), beside what the schedule and the sizes of the parameters say. `--ddp` gives each rank an equal part of the
machine's memory and shows which stage does not fit.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fxshard
import fxshard.checkpoint
from benchmarks.machine import describe
from examples.models import GPT, GPTConfig

RESULTS = Path(__file__).parent / "results"
MIB = 2**20


def status(name: str) -> float:
    """A memory field of this process in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def machine_mib() -> float:
    with open("/proc/meminfo") as lines:
        return int(next(lines).split()[1]) / 1024


class Stages:
    """Runs one stage after the other and keeps the time and the peak of each."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from what is held now
        started = time.perf_counter()
        result = function()
        row = {"stage": name, "seconds": round(time.perf_counter() - started, 1)}
        self.rows.append({**row, "peak_mib": round(status("VmHWM")), "after_mib": round(status("VmRSS"))})
        dist.barrier()
        return result


def config(arguments: argparse.Namespace) -> GPTConfig:
    return GPTConfig(arguments.layers, arguments.width, 16, arguments.vocabulary, arguments.length, tied=True)


def sharded(arguments: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    held: dict[str, Any] = {}
    torch.manual_seed(0)
    model = stages.run("build, without memory", lambda: fxshard.deferred_init(GPT, config(arguments)))
    stages.run("compile and initialise", lambda: fxshard.compile(model, F=dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for number in range(arguments.steps):
        stages.run(f"step {number}: forward and backward", lambda: loss_of(model, arguments, held))
        stages.run(f"step {number}: AdamW", lambda: (optimizer.step(), optimizer.zero_grad()))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        stages.run("save", lambda: fxshard.checkpoint.save(shared[0], model, optimizer, step=arguments.steps))
        on_disk = sum(f.stat().st_size for f in Path(shared[0]).rglob("*") if f.is_file())
        dist.barrier()
    schedule = model.schedule
    shards = sum(f.shard_numel * f.dtype.itemsize for f in schedule.flats.values())
    residents = sum(schedule.flats[name].full_bytes for name in schedule.resident)
    parts = {
        "shards of the parameters": shards,
        "shards of the gradients": shards,
        "two moments": 2 * shards,
        "arena: gathered units, gradients to reduce, staging": schedule.memory.arena_bytes,
        "residents, from forward to backward": residents,
    }
    return {
        "parameters": sum(f.numel for f in schedule.flats.values()),
        "largest_unit_mib": round(max(f.full_bytes for f in schedule.flats.values()) / MIB),
        "parts_mib": {name: round(value / MIB) for name, value in parts.items()},
        "checkpoint_mib": round(on_disk / MIB),
        "losses": held["losses"],
    }


def replicated(arguments: argparse.Namespace, stages: Stages) -> dict[str, Any]:
    """Each rank may have its part of the machine."""
    part = int(machine_mib() * MIB / dist.get_world_size())
    resource.setrlimit(resource.RLIMIT_DATA, (part, part))
    held: dict[str, Any] = {}
    try:
        torch.manual_seed(0)
        model = stages.run("build", lambda: GPT(config(arguments)))
        model = stages.run("DDP", lambda: nn.parallel.DistributedDataParallel(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        stages.run("forward and backward", lambda: loss_of(model, arguments, held))
        stages.run("AdamW", lambda: (optimizer.step(), optimizer.zero_grad()))
    except (RuntimeError, MemoryError) as error:
        return {
            "limit_mib": part // MIB,
            "failed_after": [row["stage"] for row in stages.rows],
            "error": str(error)[:200],
        }
    return {"limit_mib": part // MIB, "failed_after": None, "error": ""}


def loss_of(model: nn.Module, arguments: argparse.Namespace, held: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (arguments.batch, arguments.length)
    tokens, targets = (torch.randint(arguments.vocabulary, shape, generator=generator) for _ in range(2))
    loss = model(tokens=tokens, targets=targets)
    loss.backward()
    held.setdefault("losses", []).append(round(float(loss.detach()), 4))


def table(rows: list[list[dict[str, Any]]]) -> str:
    """The stages, with every rank's peak."""
    ranks = " | ".join(f"rank {r}" for r in range(len(rows)))
    lines = [f"| stage | seconds | {ranks} |", "|---" * (len(rows) + 2) + "|"]
    for stage in zip(*rows):
        peaks = " | ".join(f"{row['peak_mib']:,}" for row in stage)
        lines.append(f"| {stage[0]['stage']} | {max(row['seconds'] for row in stage):.0f} | {peaks} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=26)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", help="where the checkpoint is written (and removed again)")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--no-result", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stages = Stages()
    before = round(status("VmRSS"))
    found = replicated(arguments, stages) if arguments.ddp else sharded(arguments, stages)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (before, stages.rows))
    if dist.get_rank() == 0:
        rows = [row for _, row in everyone]
        print(f"{dist.get_world_size()} ranks of {machine_mib():,.0f} MiB; a rank before anything: {before:,} MiB")
        print(f"most memory of each stage, MiB:\n\n{table(rows)}\n")
        for name, value in found.items():
            print(f"{name}: {value}")
        if not arguments.no_result:
            result = {
                "machine": describe(),
                "memory_mib": round(machine_mib()),
                "before_mib": before,
                "stages": rows,
                **found,
            }
            name = "big_model_ddp.json" if arguments.ddp else "big_model.json"
            (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
