"""What the tests share: the models of the matrix, which part of it every run does, and real ranks held to the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.harness import Ranks
from tests.parity.compare import differences, text, worst
from tests.parity.oracle import Case, Record, train
from tests.parity.sharded import train_rank

MODELS = ("mlp", "gpt", "llama", "mixtral", "whisper", "resnet")

TIMEOUT_S = 300.0
"""For a training run on real ranks."""


def few_and_full(few: Sequence[Case], full: Sequence[Case]) -> list[Any]:
    """Parameters of a test: a part for every run, the rest marked `full`."""
    rest = [case for case in full if case not in few]
    return [
        *(pytest.param(c, id=str(c)) for c in few),
        *(pytest.param(c, id=str(c), marks=pytest.mark.full) for c in rest),
    ]


def largest_difference(ranks: Ranks, case: Case) -> tuple[float, str]:
    """Over all ranks, and in words. The ranks' parameters and moments are the same bits on all.

    In mixed precision the oracle clips by the norms that the ranks found, see `expected_of`: 24 bits of a norm that differ
    in the last one would be another rounding of every gradient.
    """
    results: list[list[Record]] = ranks.run(case.W, train_rank, case, timeout_s=TIMEOUT_S)
    for r, result in enumerate(results):
        apart = differences(shared(results[0]), shared(result))
        assert not any(d.bits for d in apart.values()), f"{case}: ranks 0 and {r} hold different values: {text(apart)}"
    expected = expected_of(case, results[0])
    found = [differences(expected, result) for result in results]
    return max(map(worst, found)), "\n".join(f"{case}, rank {r}: {text(d)}" for r, d in enumerate(found))


def shared(records: list[Record]) -> list[Record]:
    """What all ranks have in common."""
    return [Record({}, r.gradients, r.parameters, r.moments, {}, {}, r.norm, r.state) for r in records]


def expected_of(case: Case, got: list[Record]) -> list[Record]:
    """What the oracle says; in mixed precision with the norms of `got`, once each is near the oracle's own."""
    norms = [r.norm for r in got if r.norm is not None]
    if case.mixed is None or not norms:
        return train(case)
    expected = train(case, norms)
    for step, (mine, theirs) in enumerate(zip(expected, norms, strict=True)):
        assert mine.norm is not None
        bound = norm_rounding(mine) * mine.norm
        assert (mine.norm - theirs).abs() <= bound, f"{case}, step {step}, norm: expected {mine.norm}, got {theirs}"
    return [replace(r, norm=norm) for r, norm in zip(expected, norms)]


def norm_rounding(record: Record) -> float:
    """How far apart two norms of n fp32 gradients may be, relative: each sums n squares, none negative, in an order of its own,
    which rounds the sum by a part of at most n * 2**-24 and the root by half of that, twice."""
    n = sum(g.numel() for g in record.gradients.values() if g is not None)
    return n * 2.0**-24
