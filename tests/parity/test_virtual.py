"""The virtual world, fp32: the bits of the plain model for one contributor, those of real ranks for several.

Whatever F, the bits are those of the captured graph run plainly. They are also those of the eager model, unless the
model computes something else when compiled: of the models here Mamba, whose scan is then an associative one; ten steps of
AdamW make 5e-7 of it. Mixtral's grouped multiplication is another operator when captured too, with the same bits on CPUs
at these sizes.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

import fxshard
from tests.distributed.harness import Ranks
from tests.parity.cases import MODELS, TIMEOUT_S, few_and_full
from tests.parity.compare import differences, text, worst
from tests.parity.oracle import Case, Record, build, worlds
from tests.parity.sharded import train_captured, train_contributors, train_eager, train_rank, train_virtual

pytestmark = pytest.mark.usefixtures("one_thread")

FACTORS = (1, 2, 4, 8)
SAME_AS_EAGER = ("mlp", "gpt", "llama", "mixtral", "mixtral_grouped", "whisper", "t5", "vit", "bert", "resnet")


def single(subject: str, F: int = 1) -> Case:
    """One contributor, fp32, AdamW: what SGD would round away shows in its moments."""
    return Case(subject, 1, F, "adamw", torch.float32)


@lru_cache(maxsize=1)
def captured(subject: str) -> list[Record]:
    return train_captured(single(subject))


def assert_same_bits(expected: list[Record], got: list[Record]) -> None:
    found = differences(expected, got)
    assert not any(d.bits for d in found.values()), text(found)


@pytest.mark.parametrize(
    "case",
    few_and_full(
        [
            *(single("mlp", F) for F in FACTORS),
            *(single(s, 4) for s in ("resnet", "bert")),
        ],
        [single(s, F) for s in (*SAME_AS_EAGER, "mamba") for F in FACTORS],
    ),
)
def test_sharding_keeps_the_bits_of_the_captured_graph(case: Case) -> None:
    assert_same_bits(captured(case.subject), train_virtual(case))


@pytest.mark.parametrize(
    "case",
    few_and_full(
        [single(s) for s in ("mlp", "two_heads", "gpt", "llama")],
        [single(s) for s in ("two_heads", *SAME_AS_EAGER)],
    ),
)
def test_bits_are_those_of_the_eager_model(case: Case) -> None:
    assert_same_bits(train_eager(case), train_virtual(case))


@pytest.mark.full
def test_the_scan_that_mamba_uses_when_compiled_differs_by_less_than_1e_6() -> None:
    found = differences(train_eager(single("mamba")), captured("mamba"))
    assert 0.0 < worst(found) < 1e-6, text(found)


SEVERAL = [Case(s, W, F, "adamw", torch.float32) for s in ("two_heads", *MODELS) for W, F in worlds((2, 3, 4))]
SOME = [c for c in SEVERAL if (c.subject, c.W, c.F) in {("two_heads", 4, 2), ("mlp", 3, 3)}]


@pytest.mark.parametrize("case", few_and_full(SOME, SEVERAL))
def test_contributors_have_the_bits_of_real_ranks(ranks: Ranks, case: Case) -> None:
    contributed = train_contributors(case)
    for result in ranks.run(case.W, train_rank, case, timeout_s=TIMEOUT_S):
        assert_same_bits(contributed, result)


def test_contributors_come_in_rank_order_and_once_a_step() -> None:
    case = Case("mlp", 2, 2)
    world = fxshard.VirtualWorld(2, contributors=2)
    model = fxshard.compile(build(case), world=world, units="none")
    with world.rank(1), pytest.raises(RuntimeError, match=r"rank 1 reduces .* after 0 other ranks"):
        model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(ValueError, match="rank 2 of a world of 2 contributors"), world.rank(2):
        pass
