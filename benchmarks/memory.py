"""Peak memory of a training step under fxshard, FSDP2, FSDP1 and DDP, by the allocator's own events and by kind.

    python -m benchmarks.memory --model gpt_512x6 --ranks 2 --systems fxshard,fsdp2,fsdp1,ddp --json FILE

Each system is built and takes three steps (forward, backward, AdamW) under torch's profiler, one system after the other, and
what each allocation is for is told by what was running and by whose memory it is: `shards` are parameters, `moments` the
optimizer's, `gradients` what `.grad` lies in, `gathered` whole parameters, `communication` other buffers of collectives, of
fxshard its `arena`, where gathered parameters and gradients on their way take turns, `activations` what else was made in
forward, `backward` what else was made in backward. The peak is that of the last step, of the rank where it is highest.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.limits import executor_of
from benchmarks.machine import describe
from benchmarks.ranks import is_rank, join, reported
from benchmarks.step import batch_of, setting_arguments
from benchmarks.systems import Setting, Trainer
from examples import models

KINDS = ("shards", "moments", "gradients", "gathered", "communication", "arena", "activations", "backward", "other")
STEPS = 3
MARK = "benchmark "
RUNNING = {
    "FSDP::all_gather_copy_out": "gathered",
    "FSDP::": "communication",
    "FullyShardedDataParallel._pre_": "gathered",
    "FullyShardedDataParallel._post_backward_prefetch": "gathered",
    "FullyShardedDataParallel._post_": "communication",
    f"{MARK}forward": "activations",
    f"{MARK}backward": "backward",
}
"""What memory is for that is allocated while something runs whose name begins so; the innermost such name counts."""


@dataclass(frozen=True)
class Change:
    """Bytes that came to an address, or went if negative, and the names of what ran, outermost first."""

    time_ns: int
    address: int
    num_bytes: int
    names: tuple[str, ...]


def measure(system: str, make: Callable[..., nn.Module], inputs: dict[str, Tensor], setting: Setting) -> dict[str, int]:
    """Bytes of each kind, and of all, at the peak of the last step."""
    gradients: set[int] = set()

    def mark(name: str) -> Any:
        if name == "optimizer":
            gradients.update(_address(p.grad) for p in trainer.model.parameters() if p.grad is not None)
        return record_function(MARK + name)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer = Trainer(system, make, inputs, setting)
        for _ in range(STEPS):
            gradients.clear()
            began = time.time_ns()
            trainer.step(mark)
        kinds = dict.fromkeys(gradients, "gradients") | _lasting(trainer)
    events = profiler.profiler.kineto_results.experimental_event_tree()
    return _at_peak(sorted(_changes(events, ()), key=lambda change: change.time_ns), began, kinds)


def _lasting(trainer: Trainer) -> dict[int, str]:
    """By address, what memory is for that is there between steps."""
    found = {_address(p): "shards" for p in trainer.model.parameters()}
    for state in trainer.optimizer.state.values():
        found |= {_address(value): "moments" for value in state.values() if isinstance(value, Tensor)}
    if trainer.name == "fxshard":
        executor = executor_of(trainer.model)
        found |= {_address(resident): "gathered" for resident in executor.residents.values()}
        found[_address(executor.arena)] = "arena"
    return found


def _address(tensor: Any) -> int:
    """Where the memory begins in which a tensor, or this rank's piece of it, lies."""
    local = getattr(tensor, "local", getattr(tensor, "_local_tensor", tensor))
    return int(local.untyped_storage().data_ptr())


def _changes(events: Sequence[Any], names: tuple[str, ...]) -> Iterator[Change]:
    for event in events:
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            yield Change(event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size, names)
        yield from _changes(event.children, (*names, event.name))


def _at_peak(changes: Sequence[Change], began: int, kinds: Mapping[int, str]) -> dict[str, int]:
    """What is alive when most is, from `began` on, by kind."""
    alive: dict[int, Change] = {}
    peak: dict[int, Change] = {}
    total = most = 0
    for change in changes:
        # What a thread of gloo's gives back is not told, but that its address is given again.
        if change.address in alive:
            total -= alive.pop(change.address).num_bytes
        if change.num_bytes > 0:
            alive[change.address] = change
            total += change.num_bytes
        if change.time_ns >= began and total > most:
            most, peak = total, dict(alive)
    result = dict.fromkeys(KINDS, 0)
    for address, change in peak.items():
        result[kinds.get(address) or _by_name(change.names)] += change.num_bytes
    assert sum(result.values()) == most
    return {**result, "total": most}


def _by_name(names: Sequence[str]) -> str:
    for name in reversed(names):
        for begin, kind in RUNNING.items():
            if name.startswith(begin):
                return kind
    return "other"


def rank_main(given: argparse.Namespace) -> None:
    with join() as rank:
        make, make_inputs = models.get(given.model)
        setting = Setting(given.F or dist.get_world_size(), given.dtype == "bf16")
        inputs = make_inputs(batch_of(given), generator=torch.Generator().manual_seed(rank))
        found = {}
        for system in given.systems:
            found[system] = measure(system, make, inputs, setting)
            gc.collect()
            dist.barrier()
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, found)
        if rank == 0:
            highest = {system: max((s[system] for s in seen), key=lambda s: s["total"]) for system in given.systems}
            Path(given.json).write_text(json.dumps(highest))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.splitlines()[0])
    setting_arguments(result, "fxshard,fsdp2,fsdp1,ddp")
    result.add_argument("--ranks", type=int, default=2)
    return result


def main() -> None:
    arguments = sys.argv[1:]
    given = parser().parse_args(arguments)
    if is_rank():
        rank_main(given)
        return
    found = reported("benchmarks.memory", arguments, 1, given.ranks)
    peaks = {system: kinds["total"] for system, kinds in found.items()}
    first = given.systems[0]
    result = {
        "ratios": {f"{first}/{system}": peaks[first] / peak for system, peak in peaks.items() if system != first},
        "machine": describe(),
        "command": " ".join(["python", "-m", "benchmarks.memory", *arguments]),
        "world": {"W": given.ranks, "F": given.F or given.ranks},
        "model": {"name": given.model, "batch": batch_of(given), "dtype": given.dtype},
        "peak_bytes": found,
    }
    print(table(result))
    if given.json:
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")


def table(result: Mapping[str, Any]) -> str:
    """Ratios first, then MiB at the peak, a row a system."""
    world, model, found = result["world"], result["model"], result["peak_bytes"]
    lines = [f"{model['name']} {model['dtype']}, batch {model['batch']} a rank, W={world['W']} F={world['F']}", ""]
    width = max(map(len, [*result["ratios"], *found]))
    lines += [f"  {name:{width}} {ratio:6.3f}" for name, ratio in result["ratios"].items()]
    kinds = [kind for kind in ("total", *KINDS) if any(of[kind] >= 2**20 / 20 for of in found.values())]
    lines += ["", "  ".join([f"  {'MiB at the peak':{width}}", *(f"{kind:>6}" for kind in kinds)])]
    for system, of in found.items():
        lines.append(
            "  ".join([f"  {system:{width}}", *(f"{of[kind] / 2**20:{max(6, len(kind))}.1f}" for kind in kinds)])
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
