"""What the tests here share: the models of the matrix, and which part of it every run does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.parity.oracle import Case

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
