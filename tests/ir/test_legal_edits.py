"""Random edits through the API: what moves and merges allow, the verifier allows, and no trained bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxshard
from fxshard import passes
from fxshard.ir import Phase, Schedule, ops
from fxshard.ir.nodes import info
from fxshard.ir.verify import verify
from tests.capture.compare import WIDTH, Block, Framed, batches

CASES = 60
"""Random schedules for each configuration."""


class Stirred(nn.Module):
    """Everything whose order matters: dropout, BatchNorm's buffers, a tied weight, a frozen one, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.norm, self.dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.layers[2].linear.weight = self.layers[0].linear.weight
        self.layers[1].linear.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(self.norm(layer(x)))
        return x


BF16 = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)

CONFIGURATIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "full": (Framed, {"world": lambda: fxshard.VirtualWorld(3)}),
    "hybrid": (Framed, {"world": lambda: fxshard.VirtualWorld(2, contributors=4)}),
    "replicated": (Framed, {"world": lambda: fxshard.VirtualWorld(1, contributors=2), "mixed_precision": BF16}),
    "casts": (Framed, {"world": lambda: fxshard.VirtualWorld(2), "mixed_precision": BF16, "rate_limit": 3}),
    "stirred": (Stirred, {"world": lambda: fxshard.VirtualWorld(2), "units": Block, "rate_limit": None}),
    "bytes": (Framed, {"world": lambda: fxshard.VirtualWorld(2), "rate_limit": None, "rate_limit_bytes": 900}),
}


class Trained:
    """A model whose step can be run again and again from the same state."""

    def __init__(self, name: str):
        make, options = CONFIGURATIONS[name]
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.world = options["world"]()
        self.model = fxshard.compile(make(), **{**options, "world": self.world})
        self.buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        self.inputs = batches(max(1, self.world.data_ranks))
        self.expected = self.step()
        self.first = self.model.schedule

    def step(self) -> list[Tensor | None]:
        """Losses, gradients and buffers of one step, every rank's batch in turn."""
        torch.manual_seed(1)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])
        for p in self.model.parameters():
            p.grad = None
        results: list[Tensor | None] = []
        for rank, batch in enumerate(self.inputs):
            with self.world.rank(rank):
                loss = self.model(batch).float().square().mean()
                loss.backward()
                results.append(loss.detach())
        for p in self.model.parameters():
            results.append(None if p.grad is None else p.grad.full_tensor().clone())
        return results + [b.clone() for b in self.model.buffers()]


TRAINED: dict[str, Trained] = {}


def trained(name: str) -> Trained:
    if name not in TRAINED:
        TRAINED.clear()
        TRAINED[name] = Trained(name)
    return TRAINED[name]


Edit = tuple[bool, str, float, int]
"""Backward or forward; `communication` or `operator` to move, or `merge`; which, and how far."""


def edit(schedule: Schedule, edits: list[Edit]) -> int:
    """Try moves and merges of gathers; returns how many were made."""
    made = 0
    for in_backward, what, which, distance in edits:
        phase = schedule.phases[in_backward]
        if what == "merge":
            made += merged(phase, which, distance)
            continue
        communication = what == "communication"
        nodes = [n for n in phase.graph.nodes if n.op == "call_function"]
        pool = [n for n in nodes if (info(n).kind in ops.LABELS) == communication]
        node = pool[int(which * (len(pool) - 1))]
        anchor = nodes[min(max(nodes.index(node) + distance, 0), len(nodes) - 1)]
        before = list(phase.graph.nodes)
        try:
            made += phase.move_before(node, anchor)
        except fxshard.ScheduleError:
            assert list(phase.graph.nodes) == before, "a refused move leaves everything where it was"
    return made


def merged(phase: Phase, which: float, distance: int) -> bool:
    """Try to make one bucket of some gathers that follow each other."""
    gathers = phase.all_gathers
    first = int(which * max(len(gathers) - 1, 0))
    some = gathers[first : first + 2 + distance % 2]
    before = [(n.name, n.args) for n in phase.graph.nodes]
    try:
        return len(some) > 1 and phase.merge_gathers(some) not in gathers
    except fxshard.ScheduleError:
        assert [(n.name, n.args) for n in phase.graph.nodes] == before, "a refused merge leaves everything as it was"
        return False


WHAT = st.sampled_from(["communication", "communication", "operator", "merge"])
EDITS = st.lists(st.tuples(st.booleans(), WHAT, st.floats(0, 1), st.integers(-40, 40)), min_size=1, max_size=25)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(edits=EDITS)
def test_what_edits_allow_is_valid_and_changes_no_bit(name, edits):
    case = trained(name)
    edited = case.first.copy(reorder=True)
    made = edit(edited, edits)
    verify(edited)
    assert ("memory-planned" in edited.established) == (made == 0)
    case.model.schedule = edited
    results = case.step()
    assert len(results) == len(case.expected)
    for result, expected in zip(results, case.expected):
        assert (result is None) == (expected is None) and (result is None or torch.equal(result, expected))


def test_the_edits_are_many_and_some_are_refused():
    """Of a few hundred tries, hundreds of moves are made and hundreds are not: the property above says something."""
    case = trained("full")
    generator = torch.Generator().manual_seed(0)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    tries, made = 0, 0
    for _ in range(20):
        edited = case.first.copy(reorder=True)
        kinds = ("operator", "communication", "communication")
        edits = [(draw(2) == 1, kinds[draw(3)], draw(1000) / 1000, draw(81) - 40) for _ in range(25)]
        tries, made = tries + 25, made + edit(edited, edits)
    assert made > 80 and tries - made > 80, (tries, made)


def test_a_plan_does_not_survive_a_move():
    edited = trained("full").first.copy()
    free = edited.backward.one("free", "layers.1")
    assert edited.backward.move_after(free, free.next)
    assert "memory-planned" not in edited.established
    passes.run([passes.PlanMemory()], edited)
    verify(edited)
