"""One check of everything a GPU is needed for, in a few minutes: `make gpu-check` or `python -m benchmarks.gpu_check`.

Parity of the virtual world and of a one-rank NCCL world with eager, kernels against torch, and overlap of streams seen in
the profiler's timestamps. Without a GPU it says so and runs the parts that a CPU can: the same checks over CPU tensors,
kernels under Triton's interpreter, gloo in place of NCCL. Ends with status 1 if any part failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of triton

import torch
import torch.distributed as dist

import fxshard
from benchmarks.machine import describe
from examples.models import GPT, GPTConfig
from fxshard.ir import FlatParameter, ParameterSpec
from fxshard.runtime import GlooWorld, NcclWorld, VirtualWorld
from fxshard.runtime.kernels import cast_shard, chunk_sum, flatten_cast_scale

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = GPTConfig(layers=3, width=64, heads=4, vocabulary=128, length=32)
LARGE = GPTConfig(layers=8, width=1024, heads=16, vocabulary=8192, length=512)


class Unavailable(Exception):
    """A part that this machine cannot run."""


def batches(config: GPTConfig, count: int, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(config.vocabulary, (batch, config.length), generator=generator).to(DEVICE) for _ in range(count)
    ]


def build(config: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    torch.manual_seed(0)
    return GPT(config).to(DEVICE, dtype)


def train(model: torch.nn.Module, tokens: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Losses and final parameters of one AdamW step a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in tokens:
        optimizer.zero_grad()
        loss = model(tokens=batch, targets=batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = [p.full_tensor() if isinstance(p, fxshard.ShardedParameter) else p.detach() for p in model.parameters()]
    return losses, whole


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max((x.double() - y.double()).abs().max().item() for x, y in zip(a, b, strict=True))


def check(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


# -- parts


def virtual_parity() -> dict[str, Any]:
    """F = 1, 2, 4, 8 give the same bits as each other, and eager's to fp32 rounding (its bits, where kernels agree)."""
    tokens = batches(SMALL, 5)
    eager = train(build(SMALL), tokens)
    results = {F: train(fxshard.compile(build(SMALL), F), tokens) for F in (1, 2, 4, 8)}
    for F in (2, 4, 8):
        same = largest_difference(results[1][0] + results[1][1], results[F][0] + results[F][1])
        check(same == 0.0, f"F={F} differs from F=1 by {same}")
    difference = largest_difference(eager[0] + eager[1], results[1][0] + results[1][1])
    check(difference <= 1e-5, f"differs from eager by {difference}")
    return {"difference_from_eager": difference}


def mixed_precision() -> dict[str, Any]:
    """bf16 parameters with fp32 reduce: F = 1, 2, 4, 8 give the same bits; the loss falls."""
    precision = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    tokens = batches(SMALL, 1) * 6
    results = {F: train(fxshard.compile(build(SMALL), F, mixed_precision=precision), tokens) for F in (1, 2, 4, 8)}
    for F in (2, 4, 8):
        same = largest_difference(results[1][0] + results[1][1], results[F][0] + results[F][1])
        check(same == 0.0, f"F={F} differs from F=1 by {same}")
    first, last = results[1][0][0].item(), results[1][0][-1].item()
    check(last < first, f"the loss went from {first} to {last}")
    return {"first_loss": first, "last_loss": last}


def cpu_offload() -> dict[str, Any]:
    """Shards in host memory, F = 1, 2, 4, in fp32 and under bf16: the loss and gradients of shards on the device, bit for bit,
    and the same training to the rounding of an optimizer on another device; all of it where it belongs."""
    precision = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    tokens = batches(SMALL, 4)
    worst = 0.0
    for dtypes, F in itertools.product((None, precision), (1, 2, 4)):
        models = [
            fxshard.compile(build(SMALL), F, mixed_precision=dtypes, cpu_offload=offload) for offload in (False, True)
        ]
        first = []
        for model in models:
            loss = model(tokens=tokens[0], targets=tokens[0])
            loss.backward()
            first.append([loss.detach(), *(p.grad.full_tensor() for p in model.parameters())])
        difference = largest_difference(*first)
        check(difference == 0.0, f"F={F}, {dtypes}: offload changes the loss or a gradient by {difference}")
        held = [t.local for p in models[1].parameters() for t in (p, p.grad)]
        check(all(t.device.type == "cpu" for t in held), "a shard or a gradient is not in host memory")
        pinned = DEVICE.type == "cpu" or all(p.local.is_pinned() for p in models[1].parameters() if p.local.numel())
        check(pinned, "a shard is not pinned")
        here, there = [train(model, tokens) for model in models]
        worst = max(worst, largest_difference(here[0] + here[1], there[0] + there[1]))
        check(worst <= 1e-4, f"F={F}, {dtypes}: training with offload differs by {worst}")
    return {"largest_difference_after_training": worst}


def contributors() -> dict[str, Any]:
    """Four ranks' batches in one process, F = 1, 2, 4: the gradient is their mean, to fp64 rounding."""
    differences = {}
    for F in (1, 2, 4):
        tokens = batches(SMALL, 4)
        plain = build(SMALL, torch.float64)
        for batch in tokens:
            (plain(tokens=batch, targets=batch) / 4).backward()
        world = VirtualWorld(F, contributors=4, device=DEVICE)
        model = fxshard.compile(build(SMALL, torch.float64), world=world)
        for rank, batch in enumerate(tokens):
            with world.rank(rank):
                model(tokens=batch, targets=batch).backward()
        ours = [p.grad.full_tensor() for p in model.parameters()]
        differences[F] = largest_difference(ours, [p.grad for p in plain.parameters() if p.grad is not None])
        check(differences[F] <= 1e-9, f"F={F}: gradients differ by {differences[F]}")
    return {"largest_difference": differences}


def one_rank_world() -> dict[str, Any]:
    """A process group of one rank: NCCL on a GPU, gloo without. W = F = 1 has no collectives: set-up and parity only."""
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        tokens = batches(SMALL, 3)
        eager = train(build(SMALL), tokens)
        ours = train(fxshard.compile(build(SMALL), 1), tokens)
        difference = largest_difference(eager[0] + eager[1], ours[0] + ours[1])
        check(difference <= 1e-5, f"differs from eager by {difference}")
    finally:
        dist.destroy_process_group()
    return {"backend": backend, "difference_from_eager": difference}


def collectives() -> dict[str, Any]:
    """Each collective of the world, bound and issued as the executor does it, over a group of one rank.

    Among one rank a gather copies and a sum changes nothing, so this shows that NCCL takes our buffers, dtypes, groups
    and the reduce into the buffer itself, not that ranks talk to each other.
    """
    on_gpu = DEVICE.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = NcclWorld(1, DEVICE) if on_gpu else GlooWorld(1)
        done = 0
        for wire in (torch.float32, torch.bfloat16, torch.float16):
            spec = ParameterSpec("weight", (1000,), (1,), torch.float32, True)
            flat = FlatParameter.build("unit", "unit", False, (spec,), 1, wire, wire)
            value = torch.randn(flat.padded_numel, device=DEVICE)
            staging = torch.empty(0, dtype=wire, device=DEVICE)
            sent, gathered = value.to(wire), torch.zeros_like(value, dtype=wire)
            world.bind_all_gather(flat, sent, gathered)(None).wait()
            check(torch.equal(gathered, sent), f"all_gather of {wire}")
            for dtype in (wire, torch.float32):
                buffer, out = value.to(wire), torch.zeros_like(value, dtype=dtype)
                world.bind_reduce_scatter(flat, buffer, out, staging)(None).wait()
                check(torch.equal(out, sent.to(dtype)), f"reduce_scatter of {wire} into {dtype}")
            pair = torch.zeros_like(gathered), torch.zeros_like(value)
            both = torch.empty(sum(t.numel() * t.itemsize for t in pair), dtype=torch.uint8, device=DEVICE)
            world.bind_bucket((flat, flat), (sent, value), pair, both)(None).wait()
            check(torch.equal(pair[0], sent) and torch.equal(pair[1], value), f"bucket of {wire} and float32")
            world.bind_all_reduce(flat, gathered, staging)(None).wait()
            check(torch.equal(gathered, sent), f"all_reduce of {wire}")
            done += 5
        flags = [True, False, True]
        check(world.presence((flat.name,), flags)() == flags, "presence")
        check(torch.equal(world.gather_flat(flat, sent), sent), "gather_flat")
        check(torch.equal(world.reduce_small(value, "max"), value), "reduce_small")
    finally:
        dist.destroy_process_group()
    return {"world": world.kind, "checked": done + 3}


def kernels() -> dict[str, Any]:
    """Triton kernels against torch: exact in fp32 and fp16, exact in bf16 on a GPU (the interpreter truncates there)."""
    use = True if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1" else None
    if use is None:
        raise Unavailable("no GPU, and TRITON_INTERPRET was not set before Triton was imported")
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
    count = 0
    torch.manual_seed(0)
    for dtype in dtypes:
        for sizes in ((1,), (5, 7, 16), (1023, 1025, 1), (4097,)):
            grads = [torch.randn(n, device=DEVICE) for n in sizes]
            offsets, end = [], 0
            for n in sizes:
                offsets.append(end)
                end += -(-n // 16) * 16
            ours, theirs = (torch.full((end,), float("nan"), device=DEVICE, dtype=dtype) for _ in range(2))
            flatten_cast_scale(grads, offsets, sizes, ours, 1 / 3, use_triton=True)
            flatten_cast_scale(grads, offsets, sizes, theirs, 1 / 3, use_triton=False)
            check(torch.equal(ours, theirs), f"flatten_cast_scale {sizes} to {dtype}")
            source = torch.randn(end, device=DEVICE)
            cast_shard(source, ours, use_triton=True)
            check(torch.equal(ours, source.to(dtype)), f"cast_shard {end} to {dtype}")
            chunks = [torch.randn(end, device=DEVICE).to(dtype) for _ in range(4)]
            chunk_sum(chunks, ours, use_triton=True)
            chunk_sum(chunks, theirs, use_triton=False)
            check(torch.equal(ours, theirs), f"chunk_sum {end} of {dtype}")
            count += 3
    return {"cases": count, "interpreter": DEVICE.type != "cuda"}


def overlap() -> dict[str, Any]:
    """With prefetch, gathers run while the compute stream works: seen in the timestamps of the profiler's GPU events."""
    if DEVICE.type != "cuda":
        raise Unavailable("streams need a GPU")
    tokens = batches(LARGE, 1, batch=8)[0]
    shares = {}
    for name, depth in (("no prefetch", 0), ("prefetch", 1)):
        model = fxshard.compile(build(LARGE), 8, forward_prefetch=depth, backward_prefetch=depth)
        for _ in range(3):
            model(tokens=tokens, targets=tokens).backward()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model(tokens=tokens, targets=tokens).backward()
            torch.cuda.synchronize()
        shares[name] = overlapped_share(profile)
        del model
    check(shares["prefetch"] > 0.0, f"nothing overlapped: {shares}")
    return {"share_of_side_stream_time_under_compute": shares}


def overlapped_share(profile: Any) -> float:
    """Of the time other streams are busy, the part during which the busiest stream is too."""
    streams: dict[int, list[tuple[int, int]]] = {}
    for event in profile.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0:
            stream = event.device_resource_id()
            streams.setdefault(stream, []).append((event.start_ns(), event.start_ns() + event.duration_ns()))
    if len(streams) < 2:
        return 0.0
    compute = max(streams, key=lambda s: sum(b - a for a, b in streams[s]))
    busy = sorted(streams.pop(compute))
    others = [interval for intervals in streams.values() for interval in intervals]
    total = sum(b - a for a, b in others)
    under = sum(max(0, min(b, d) - max(a, c)) for a, b in others for c, d in busy if c < b and a < d)
    return under / total if total else 0.0


def step_time() -> dict[str, Any]:
    """Milliseconds a step, median of 10: eager, and the virtual world at F = 1 and 8. Stated, not judged."""
    config = LARGE if DEVICE.type == "cuda" else SMALL
    tokens = batches(config, 1)[0]
    result = {}
    models: dict[str, Callable[[], torch.nn.Module]] = {
        "eager": lambda: build(config),
        "F=1": lambda: fxshard.compile(build(config), 1),
        "F=8": lambda: fxshard.compile(build(config), 8),
    }
    for name, make in models.items():
        model = make()
        times = []
        for _ in range(13):
            start = time.perf_counter()
            model(tokens=tokens, targets=tokens).backward()
            model.zero_grad()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        result[name] = sorted(times[3:])[5] * 1e3
    return {"milliseconds": result}


def memory() -> dict[str, Any]:
    """The arena and the residents hold what plan-memory said, to the byte."""
    model = fxshard.compile(build(SMALL), 4)
    tokens = batches(SMALL, 1)[0]
    model(tokens=tokens, targets=tokens).backward()
    executor = model.__dict__["_fxshard"].executor
    planned = model.schedule.memory
    held = sum(t.numel() * t.element_size() for t in executor.residents.values())
    check(
        executor.arena.numel() == planned.arena_bytes, f"arena {executor.arena.numel()}, planned {planned.arena_bytes}"
    )
    check(held == planned.resident_bytes, f"residents {held}, planned {planned.resident_bytes}")
    return {"arena_bytes": planned.arena_bytes, "resident_bytes": held}


PARTS = (
    kernels,
    virtual_parity,
    mixed_precision,
    cpu_offload,
    contributors,
    one_rank_world,
    collectives,
    memory,
    overlap,
    step_time,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    machine = describe()
    print(f"machine: {machine['gpu'] or 'no GPU: running what a CPU can'}; torch {machine['torch']}, "
          f"triton {machine['triton'] or 'none'}")  # fmt: skip
    parts: dict[str, Any] = {}
    for part in PARTS:
        start = time.perf_counter()
        torch.compiler.reset()
        try:
            outcome: dict[str, Any] = {"status": "passed", **part()}
        except Unavailable as reason:
            outcome = {"status": "not run", "reason": str(reason)}
        except Exception as error:
            traceback.print_exc()
            outcome = {"status": "FAILED", "reason": f"{type(error).__name__}: {error}"}
        seconds = round(time.perf_counter() - start, 1)
        parts[part.__name__] = {**outcome, "seconds": seconds}
        details = {k: v for k, v in outcome.items() if k != "status"}
        print(f"{outcome['status']:<8} {part.__name__:<16} {seconds:>6} s  {details}", flush=True)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "parts": parts}, indent=2) + "\n")
    failed = [name for name, outcome in parts.items() if outcome["status"] == "FAILED"]
    print("FAILED: " + ", ".join(failed) if failed else "all parts that could run passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
