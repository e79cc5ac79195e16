"""Ten steps on real ranks against one eager process: losses, gradients, parameters, buffers, moments, random draws.

In float64 to 1e-9: a wrong divisor, a wrong order or a stale value is larger, the order of a sum smaller. In float32
with SGD to 1e-5: AdamW divides by the root of a second moment, and the order of a sum alone makes 3e-4 of it. In
bfloat16 with float32 reduction the process makes the same casts and sums in the same order, so the bits are the same.

Largest differences seen, all models, W and F: float64 1e-14, float32 with SGD 2e-6, bfloat16 none.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.harness import Ranks
from tests.parity.cases import MODELS, few_and_full, largest_difference
from tests.parity.oracle import Case, worlds

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = ("sgd", "adamw")

FLOAT64 = [
    *(Case("two_heads", W, F, "adamw") for W, F in ((1, 1), (2, 1), (2, 2), (4, 2))),
    Case("gpt", 3, 3, "adamw", ragged=False),
]
FLOAT32 = [Case("mlp", 4, 2, "sgd", torch.float32)]
BFLOAT16 = [
    Case("mlp", 3, 3, "adamw", torch.float32, torch.bfloat16),
    Case("llama", 2, 2, "adamw", torch.float32, torch.bfloat16),
    Case("resnet_wide", 2, 2, "sgd", torch.float32, torch.bfloat16),
]

FULL_FLOAT64 = [
    *(Case(s, W, F, o) for s in ("two_heads", *MODELS) for W, F in worlds() for o in OPTIMIZERS),
    *(Case("gpt", W, F, o, ragged=False) for W, F in worlds() for o in OPTIMIZERS),
]
FULL_FLOAT32 = [
    *(Case(s, W, F, "sgd", torch.float32) for s in ("two_heads", *MODELS) for W, F in worlds()),
    Case("gpt", 3, 3, "sgd", torch.float32, ragged=False),
]
FULL_BFLOAT16 = [
    *(
        Case(s.replace("resnet", "resnet_wide"), W, F, o, torch.float32, torch.bfloat16)
        for s in ("two_heads", *MODELS)
        for W, F in worlds()
        for o in OPTIMIZERS
    ),
    Case("gpt", 4, 2, "sgd", torch.float32, torch.bfloat16, ragged=False),
]


@pytest.mark.parametrize("case", few_and_full(FLOAT64, FULL_FLOAT64))
def test_float64_equals_eager_to_1e_9(ranks: Ranks, case: Case) -> None:
    difference, where = largest_difference(ranks, case)
    assert difference < 1e-9, where


@pytest.mark.parametrize("case", few_and_full(FLOAT32, FULL_FLOAT32))
def test_float32_with_sgd_equals_eager_to_1e_5(ranks: Ranks, case: Case) -> None:
    difference, where = largest_difference(ranks, case)
    assert difference < 1e-5, where


@pytest.mark.parametrize("case", few_and_full(BFLOAT16, FULL_BFLOAT16))
def test_bfloat16_with_float32_reduction_has_the_bits_of_one_process_with_the_same_casts(
    ranks: Ranks, case: Case
) -> None:
    difference, where = largest_difference(ranks, case)
    assert difference == 0.0, where
