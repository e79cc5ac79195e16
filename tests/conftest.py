"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Processes for `ranks.run(W, function, *args)`, started when first used and kept for the session."""
    with Ranks() as processes:
        yield processes
