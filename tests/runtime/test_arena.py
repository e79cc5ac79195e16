"""Memory: the schedule's numbers computed again from its nodes, and what a step really allocates."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import fxshard
from fxshard.ir import Phase, Schedule
from tests.capture.compare import Chain, Framed, batches, events, full, identical, mean_of_squares, pair

X = batches(1)[0]
BF16 = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
ALL_BF16 = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.bfloat16)


def up(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def kind_of(node) -> tuple[str, str | None]:
    found = node.meta.get("fxshard")
    return (found.kind, found.flat) if found is not None else ("", None)


def gathered_peak(schedule: Schedule, resident: int) -> int:
    """Most bytes of gathered parameters at once: gathers not yet freed (a FREE still holds it), and residents."""
    peak = 0
    for phase in schedule.phases:
        alive: dict[str, int] = {}
        for node in phase.graph.nodes:
            kind, flat = kind_of(node)
            makes = kind == "all_gather" or (kind == "cast_shard" and schedule.F == 1)
            if makes and flat not in schedule.resident:
                alive[flat] = up(schedule.flats[flat].full_bytes)
            peak = max(peak, sum(alive.values()))
            if kind == "free":
                alive.pop(flat, None)
    return peak + resident


def gradient_peak(schedule: Schedule) -> int:
    """Most bytes at once of flat gradient buffers up to the end of their reduce, and of reduce output and staging up to ACC.
    What has its parameter's dtype once it is reduced is made in the memory of `.grad`, and the first chunk received with it."""
    if schedule.backward is None:
        return 0
    peak = 0
    alive: dict[tuple[str, str], int] = {}
    for node in schedule.backward.graph.nodes:
        kind, name = kind_of(node)
        if name is None or name not in schedule.flats:
            continue
        flat = schedule.flats[name]
        summed = flat.reduce_dtype if schedule.replicas > 1 or flat.F == 1 else flat.dtype
        if kind == "flatten_grads" and (flat.F > 1 or summed != flat.dtype):
            alive[kind, name] = up(flat.padded_numel * flat.reduce_dtype.itemsize)
        elif kind == "reduce_scatter":
            received = flat.F - 1 - (summed == flat.reduce_dtype) if schedule.direct_exchange else 0
            output = up(schedule.held_shards * flat.shard_numel * summed.itemsize) if summed != flat.dtype else 0
            alive[kind, name] = output + up(received * flat.shard_numel * flat.reduce_dtype.itemsize)
        elif kind == "all_reduce" and schedule.direct_exchange:
            part = -(-flat.shard_numel // schedule.replicas)
            alive[kind, name] = up((schedule.replicas - 1) * part * flat.reduce_dtype.itemsize)
        peak = max(peak, sum(alive.values()))
        if kind == "wait" and node.meta["fxshard"].queue == "compute" and schedule.F > 1:
            if any(kind_of(user)[0] == "accumulate_grad" for user in node.users):
                alive.pop(("flatten_grads", name), None)
        elif kind == "accumulate_grad":
            for member in ("flatten_grads", "reduce_scatter", "all_reduce"):
                alive.pop((member, name), None)
    return peak


def slots(schedule: Schedule, phase: Phase) -> list:
    return [n for n in phase.graph.nodes if "slot" in n.meta]


CONFIGURATIONS = [
    {"F": 1}, {"F": 1, "W": 4}, {"F": 2}, {"F": 3}, {"F": 8}, {"F": 2, "W": 4}, {"F": 2, "W": 6},
    {"F": 2, "mixed_precision": BF16}, {"F": 1, "mixed_precision": BF16}, {"F": 2, "W": 4, "mixed_precision": BF16},
    {"F": 3, "mixed_precision": ALL_BF16}, {"F": 3, "W": 6, "mixed_precision": ALL_BF16},
    {"F": 3, "backward_prefetch": 3, "forward_prefetch": 3, "rate_limit": 4},
    {"F": 3, "keep_root_resident": False}, {"F": 3, "reshard_after_forward": False}, {"F": 3, "units": "none"},
]  # fmt: skip


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_peaks_and_arena_follow_from_the_nodes(options):
    schedule = fxshard.trace(Framed(5), (X,), **options)
    memory = schedule.memory
    resident = sum(schedule.flats[name].full_bytes for name in schedule.resident)
    assert memory.resident_bytes == resident
    assert memory.peak_gathered_bytes == gathered_peak(schedule, resident)
    assert memory.peak_gradient_bytes == gradient_peak(schedule)
    used = [n.meta["slot"] for phase in schedule.phases for n in slots(schedule, phase)]
    assert all(s.offset % 16 == 0 and s.num_bytes % 16 == 0 for s in used)
    assert memory.arena_bytes == max((s.offset + s.num_bytes for s in used), default=0)


@pytest.mark.parametrize("options", CONFIGURATIONS, ids=str)
def test_every_gathered_and_gradient_buffer_has_a_slot_of_its_size(options):
    schedule = fxshard.trace(Framed(5), (X,), **options)
    for phase in schedule.phases:
        for node in phase.graph.nodes:
            kind, name = kind_of(node)
            if kind == "all_gather":
                assert ("slot" in node.meta) == (name not in schedule.resident)
                if "slot" in node.meta:
                    assert node.meta["slot"].num_bytes == up(schedule.flats[name].full_bytes)
            elif kind == "flatten_grads":
                assert ("slot" in node.meta) == (schedule.F > 1)
                if "slot" in node.meta:
                    assert node.meta["slot"].num_bytes == up(schedule.flats[name].grad_bytes)


def test_the_arena_is_smaller_than_the_sum_of_its_buffers():
    schedule = fxshard.trace(Framed(12), (X,), F=2)
    total = sum(n.meta["slot"].num_bytes for n in slots(schedule, schedule.backward))
    assert schedule.memory.arena_bytes * 3 < total


def test_the_peak_does_not_grow_with_depth():
    peaks = {fxshard.trace(Framed(n), (X,), F=2).memory.peak_gathered_bytes for n in (3, 6, 12)}
    assert len(peaks) == 1


@pytest.mark.parametrize("options", [{}, {"rate_limit": 3, "backward_prefetch": 3, "forward_prefetch": 3},
                                     {"keep_root_resident": False}, {"mixed_precision": BF16}], ids=str)  # fmt: skip
def test_peak_gathered_at_run_time_equals_the_plan(options):
    _, model = pair(lambda: Framed(5), **options)
    mean_of_squares(model(X)).backward()
    seen = events(model)
    mean_of_squares(model(X)).backward()
    schedule, alive, peak = model.schedule, {}, 0
    for _, kind, flat in seen:
        if kind == "all_gather":
            alive[flat] = up(schedule.flats[flat].full_bytes)
        peak = max(peak, sum(alive.values()))
        if kind == "free":
            del alive[flat]
    assert not alive
    # A resident's memory is its own for good, gathered or not.
    resident = {n: schedule.flats[n].full_bytes for n in schedule.resident}
    peak_without = 0
    for _, kind, flat in seen:
        if kind == "all_gather" and flat not in resident:
            alive[flat] = up(schedule.flats[flat].full_bytes)
        peak_without = max(peak_without, sum(alive.values()))
        if kind == "free":
            alive.pop(flat, None)
    assert peak_without + sum(resident.values()) == schedule.memory.peak_gathered_bytes
    assert peak <= schedule.memory.peak_gathered_bytes


def allocations(step) -> list[int]:
    """Sizes of the allocations of one step, in order, by the torch profiler."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    found = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.typed[0] == torch._C._profiler._EventType.Allocation:
            found.append(event.typed[1].alloc_size)
    return [size for size in found if size > 0]


def wide() -> nn.Module:
    """Weights much larger than activations, so that sizes tell buffers apart."""
    return Framed(3, 32)


@pytest.mark.parametrize(
    "options", [{"F": 2}, {"F": 3, "mixed_precision": BF16}, {"F": 1, "cpu_offload": True}], ids=str
)
def test_the_arena_is_one_allocation_of_the_planned_size(options):
    _, model = pair(wide, **options)
    x = batches(1, (2, 32))[0]

    def step() -> None:
        mean_of_squares(model(x)).backward()

    first = allocations(step)
    planned = model.schedule.memory.arena_bytes
    assert first.count(planned) == 1
    assert model.__dict__["_fxshard"].executor.arena.numel() == planned


@pytest.mark.parametrize("options", [{"F": 2}, {"F": 3, "mixed_precision": BF16}, {"F": 1}], ids=str)
def test_a_steady_step_allocates_no_buffer(options):
    """From the third step on neither arena, residents nor gradients: their memory stays where it is."""
    _, model = pair(wide, keep_memory=True, **options)
    x = batches(1, (2, 32))[0]
    state = model.__dict__["_fxshard"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        mean_of_squares(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def addresses() -> list[int]:
        found = [state.executor.arena.data_ptr()]
        found += [t.data_ptr() for t in state.executor.residents.values()]
        found += [s.shard.data_ptr() for s in state.storages.values()]
        return found + [s._gradient.data_ptr() for s in state.storages.values()]

    step()
    step()
    before = addresses()
    sizes = allocations(step)
    assert addresses() == before
    buffers = {model.schedule.memory.arena_bytes} | {s.shard.nbytes for s in state.storages.values()}
    buffers |= {t.nbytes for t in state.executor.residents.values()}
    assert not buffers & set(sizes)


@pytest.mark.parametrize("options", [{"F": 1}, {"F": 2}, {"F": 2, "mixed_precision": BF16}], ids=str)
def test_forward_holds_no_gradients(options):
    """Unless F = 1, someone holds one, or `keep_memory` says otherwise; what was held stays as it was."""
    _, model = pair(wide, **options)
    x, y = batches(2, (2, 32))
    storages = model.__dict__["_fxshard"].storages.values()

    def held() -> int:
        return sum(s._gradient.untyped_storage().nbytes() for s in storages)

    everything = sum(s.shard.nbytes for s in storages)

    def step(batch, in_forward: int) -> list:
        loss = mean_of_squares(model(batch))
        assert held() == in_forward
        loss.backward()
        assert held() == everything
        return [full(p.grad) for p in model.parameters()]

    between = everything if options["F"] == 1 else 0
    mean_of_squares(model(x)).backward()
    model.zero_grad()
    first = step(x, between)
    step(y, everything)  # added to what is there
    kept = next(model.parameters()).grad.detach()
    value = full(kept)
    model.zero_grad()
    of_kept = next(s.shard.nbytes for s in storages if kept.fqn in s.parameters)
    again = step(x, between or of_kept)
    assert identical(full(kept), value)
    model.zero_grad()
    assert all(a.equal(b) and a.equal(c) for a, b, c in zip(first, again, step(x, between), strict=True))


@pytest.mark.parametrize("options", [{"F": 1}, {"F": 2}, {"F": 2, "mixed_precision": BF16}], ids=str)
def test_gradients_are_reduced_where_they_stay_and_what_is_added_to_them_is_given_back(options):
    _, model = pair(wide, **options)
    x = batches(1, (2, 32))[0]
    storages = model.__dict__["_fxshard"].storages
    mean_of_squares(model(x)).backward()
    landed: dict[str, list] = {name: [] for name in storages}

    def noted(name: str):
        chosen = type(storages[name]).land(storages[name])
        landed[name].append((weakref.ref(chosen), chosen is storages[name].own))
        return chosen

    for name, storage in storages.items():
        storage.land = functools.partial(noted, name)
    for clear in (True, False, False, True):
        if clear:
            model.zero_grad()
        mean_of_squares(model(x)).backward()
    for name, storage in storages.items():
        assert [own for _, own in landed[name]] == [True, False, False, True]
        assert landed[name][-1][0]() is storage.own
        assert [at() for at, _ in landed[name][1:3]] == [None, None]
        assert all(p.grad.local.data_ptr() >= storage.own.data_ptr() for p in storage.parameters.values())


def test_two_schedules_share_one_arena():
    _, model = pair(Framed)
    mean_of_squares(model(X)).backward()
    with torch.no_grad():
        model(X)
    arena = model.__dict__["_fxshard"].executor.arena
    sizes = [s.memory.arena_bytes for s in model.schedules]
    assert len(sizes) == 2 and sizes[0] != sizes[1] and arena.numel() == max(sizes)


def test_nothing_saved_for_backward_is_a_gathered_buffer():
    """Saved bytes are those of activations: the weights of a unit are not among them."""
    _, model = pair(lambda: Chain(3, 64), 2)
    x = batches(1, (2, 64))[0]
    out = model(x)
    arena = model.__dict__["_fxshard"].executor.arena
    low, high = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    saved = out.grad_fn.saved_tensors
    assert saved
    assert not [t for t in saved if low <= t.data_ptr() < high]
    assert sum(t.nbytes for t in saved) < 64 * 64 * 4
