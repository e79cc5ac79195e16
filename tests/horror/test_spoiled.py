"""The comparison of the horror model is itself held to something: spoil one thing of each kind, and it says which."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.horror.test_horror import horror
from tests.parity.compare import differences, text, worst
from tests.parity.oracle import Record, train

CASE = horror(2, 2, "float64", "adamw", 3, True)
TINY = 2e-9
"""Above the tolerance, and far below what any wrong computation makes."""

NUDGED: dict[str, tuple[str, Callable[[Record], Tensor | None]]] = {
    "gradients": ("step 9, blocks.0.down.B[2, 0]", lambda r: r.gradients["blocks.0.down.B"]),
    "parameters": ("step 9, scale[]", lambda r: r.parameters["scale"]),
    "moments": (
        "step 9, blocks.1.gate.parametrizations.weight.original0/exp_avg[2, 0]",
        lambda r: r.moments["blocks.1.gate.parametrizations.weight.original0/exp_avg"],
    ),
    "buffer": ("step 9, peak of rank 1[]", lambda r: r.buffers[1]["peak"]),
    "loss": ("step 9, rank 1[2]", lambda r: r.losses[1]),
    "norm": ("step 9, total[]", lambda r: r.norm),
    "state": ("step 9, batch_norm.running_mean[2]", lambda r: r.state["batch_norm.running_mean"]),
}


def spoiled(spoil: Callable[[Record], object]) -> dict[str, str]:
    """What the comparison tells, by kind, after the last step was spoiled."""
    records = copy.deepcopy(train(CASE))
    spoil(records[-1])
    found = differences(train(CASE), records)
    return {kind: str(d) for kind, d in found.items() if d.bits}


@pytest.mark.parametrize("kind", NUDGED)
def test_a_value_that_is_slightly_off(kind: str) -> None:
    where, pick = NUDGED[kind]

    def nudge(record: Record) -> None:
        value = pick(record)
        assert value is not None
        value[(2, 0)[: value.dim()]] += TINY

    expected = pick(train(CASE)[-1])
    assert expected is not None
    before = expected[(2, 0)[: expected.dim()]].item()
    told = spoiled(nudge)
    assert list(told) == [kind]
    assert told[kind] == f"{kind} {TINY:.1e} at {where}: expected {before!r}, got {before + TINY!r}"


def test_the_bytes_of_a_frozen_weight() -> None:
    def flip(record: Record) -> None:
        record.parameters["blocks.1.up.weight"][3, 1] ^= 1

    before = train(CASE)[-1].parameters["blocks.1.up.weight"][3, 1].item()
    assert spoiled(flip) == {
        "parameters": f"parameters 1.0e+00 at step 9, blocks.1.up.weight[3, 1]: expected {before}, got {before ^ 1}"
    }


def test_zeros_for_no_gradient_and_none_for_one() -> None:
    assert spoiled(lambda r: r.gradients.update({"spare.bias": torch.zeros(1, dtype=torch.float64)})) == {
        "gradients": "gradients inf at step 9, spare.bias: expected None, got (1,) of torch.float64"
    }
    assert spoiled(lambda r: r.gradients.update({"norm.weight": None})) == {
        "gradients": "gradients inf at step 9, norm.weight: expected (5,) of torch.float64, got None"
    }


def test_what_is_missing_and_what_is_too_much() -> None:
    assert spoiled(lambda r: r.moments.pop("empty/step")) == {
        "moments": "moments inf at step 9, empty/step: expected () of torch.float32, got nothing"
    }
    assert spoiled(lambda r: r.buffers[0].pop("peak")) == {
        "buffer": "buffer inf at step 9, peak of rank 0: expected () of torch.float64, got nothing"
    }
    told = spoiled(lambda r: r.state.pop("head.weight"))
    assert told.pop("keys").startswith("keys inf at step 9, state dict: expected scale, empty, embed.weight")
    assert told == {"state": "state inf at step 9, head.weight: expected (11, 5) of torch.float64, got nothing"}
    told = spoiled(lambda r: r.state.update(peak=torch.zeros((), dtype=torch.float64)))
    assert told.pop("keys").endswith("head.weight, peak")
    assert told == {"state": "state inf at step 9, peak: expected nothing, got () of torch.float64"}


def test_keys_in_another_order() -> None:
    def reorder(record: Record) -> None:
        record.state["scale"] = record.state.pop("scale")

    assert list(spoiled(reorder)) == ["keys"]


def test_another_draw() -> None:
    def draw(record: Record) -> None:
        record.random[0] = torch.Generator().manual_seed(1).get_state()

    assert list(spoiled(draw)) == ["random"]


def test_nothing_spoiled_is_nothing_told() -> None:
    found = differences(train(CASE), copy.deepcopy(train(CASE)))
    assert worst(found) == 0.0
    assert text(found) == "the same bits"
    assert set(found) == {*NUDGED, "random"}
