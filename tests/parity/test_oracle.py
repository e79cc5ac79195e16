"""The oracle and the comparison are themselves held to something."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from tests.parity.compare import differences, text, worst
from tests.parity.models import SUBJECTS
from tests.parity.oracle import Case, Record, build, train
from tests.parity.sharded import train_eager

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("subject", ["mlp", "two_heads", "gpt", "resnet"])
def test_one_rank_is_plain_training(subject: str) -> None:
    case = Case(subject, 1, 1, "adamw")
    found = differences(train(case), train_eager(case))
    assert not any(d.bits for d in found.values()), text(found)


def test_equal_batches_of_two_ranks_are_one_batch_of_both() -> None:
    case = Case("mlp", 2, 1, ragged=False, steps=1)
    model = build(case)
    batches = [SUBJECTS["mlp"].batch(0, r, case.dtype, False) for r in range(2)]
    loss = model(**{name: torch.cat([b[name] for b in batches]) for name in batches[0]})
    loss.backward()
    (record,) = train(case)
    assert abs(loss.item() - (record.losses[0] + record.losses[1]).item() / 2) < 1e-14
    for name, p in model.named_parameters():
        mean = record.gradients[name]
        if p.grad is None:
            assert mean is None
        else:
            assert mean is not None and (p.grad - mean).abs().max() < 1e-14


def test_mixed_precision_is_near_fp32_and_not_the_same() -> None:
    case = Case("mlp", 2, 1, dtype=torch.float32, steps=1)
    found = differences(train(case), train(replace(case, mixed=torch.bfloat16)))
    assert 1e-4 < found["gradients"].largest < 3e-2, text(found)


def test_ranks_have_batches_draws_and_buffers_of_their_own() -> None:
    last = train(Case("resnet", 3, 1))[-1]
    assert len({loss.item() for loss in last.losses.values()}) == 3
    name = "resnet.embedder.embedder.normalization.running_mean"
    assert len({buffers[name][0].item() for buffers in last.buffers.values()}) == 3
    gpt = train(Case("gpt", 2, 1, steps=1))[-1]
    assert not torch.equal(gpt.random[0], gpt.random[1])


def changed(change: str) -> list[Record]:
    records = copy.deepcopy(train(Case("mlp", 2, 1)))
    record = records[3]
    if change == "divisor":
        record.gradients = {n: None if g is None else g * 2 for n, g in record.gradients.items()}
    elif change == "stale":
        record.parameters = records[2].parameters
    elif change == "zeros for None":
        record.gradients["spare.weight"] = torch.zeros(1, 5, dtype=torch.float64)
    elif change == "None for a gradient":
        record.gradients["norm.bias"] = None
    elif change == "no moment":
        del record.moments["norm.bias/momentum_buffer"]
    elif change == "not a number":
        record.losses[1] = torch.tensor(math.nan, dtype=torch.float64)
    elif change == "dtype":
        record.losses[1] = record.losses[1].float()
    elif change == "last digits":
        record.losses[0] = record.losses[0] + 2e-9
    return records


@pytest.mark.parametrize(
    "change",
    ["divisor", "stale", "zeros for None", "None for a gradient", "no moment", "not a number", "dtype", "last digits"],
)
def test_the_comparison_sees(change: str) -> None:
    found = differences(train(Case("mlp", 2, 1)), changed(change))
    assert worst(found) > 1e-9
    assert any("step 3" in str(d) for d in found.values())


def test_the_comparison_of_equals_is_nothing() -> None:
    found = differences(train(Case("mlp", 2, 1)), changed("nothing"))
    assert worst(found) == 0.0
    assert text(found) == "the same bits"


def test_signed_zeros_are_other_bits_of_no_size() -> None:
    (a,) = train(Case("mlp", 1, 1, steps=1))
    b = replace(a, losses={0: torch.tensor(-0.0, dtype=torch.float64)})
    found = differences([replace(a, losses={0: torch.tensor(0.0, dtype=torch.float64)})], [b])
    assert (found["loss"].largest, found["loss"].bits) == (0.0, 1)
