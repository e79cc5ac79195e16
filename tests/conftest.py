"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for `ranks.run(W, function, *args)`, started when first used and kept for the session."""
    with Ranks() as processes:
        yield processes


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as the ranks have, so that sums are in the same order here and there; nothing captured is left over."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
