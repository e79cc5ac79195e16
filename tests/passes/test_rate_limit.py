"""rate-limit: gathers held back, throttles, and gradient buffers that end before the next is filled."""

import pytest

from fxshard.passes import RateLimit
from tests.capture.compare import Framed
from tests.passes.golden import after, golden, node_names, part, remarks, text


def test_golden():
    # Two in flight: AG layers.2 waits for FREE layers.0 on its stream, and the reduce of layers.2 has ended before
    # layers.0 fills a third gradient buffer.
    schedule = after(7)
    assert text(schedule, "forward") == golden("""
        AG     layers.0  288 B
        AG     layers.1  288 B
                                              WAIT   layers.0  for AG
                                              FWD    layers.0
                                              FREE   layers.0
                                              FWD    layers.0
        LIMIT            after FREE layers.0
        AG     layers.2  288 B
                                              WAIT   layers.1  for AG
                                              FWD    layers.1
                                              FREE   layers.1
                                              FWD    layers.1
                                              WAIT   layers.2  for AG
                                              FWD    layers.2
                                              FREE   layers.2
                                              FWD    layers.2
    """)
    assert part(text(schedule, "backward").splitlines()[-8:]) == golden("""
        WAIT   layers.2  for RS
        ACC    layers.2  144 B
        FLAT   layers.0  288 B
                                 RS     layers.0  288 B
        WAIT   layers.1  for RS
        ACC    layers.1  144 B
        WAIT   layers.0  for RS
        ACC    layers.0  144 B
    """)


def test_golden_one_at_a_time():
    # With one in flight the prefetch is undone: each gather is held back to the FREE before it.
    assert text(after(7, rate_limit=1), "forward") == golden("""
        AG     layers.0  288 B
                                              WAIT   layers.0  for AG
                                              FWD    layers.0
                                              FREE   layers.0
        LIMIT            after FREE layers.0
        AG     layers.1  288 B
                                              FWD    layers.0
                                              WAIT   layers.1  for AG
                                              FWD    layers.1
                                              FREE   layers.1
        LIMIT            after FREE layers.1
        AG     layers.2  288 B
                                              FWD    layers.1
                                              WAIT   layers.2  for AG
                                              FWD    layers.2
                                              FREE   layers.2
                                              FWD    layers.2
    """)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_in_bytes_is_the_same_limit(limit):
    def gathers(schedule, phase):
        return [line for line in text(schedule, phase).splitlines() if line.split()[0] in ("AG", "LIMIT", "FREE")]

    by_bytes, by_count = after(7, rate_limit=None, rate_limit_bytes=limit * 288), after(7, rate_limit=limit)
    for phase in ("forward", "backward"):
        assert gathers(by_bytes, phase) == gathers(by_count, phase)
    assert any("LIMIT" in line for line in gathers(by_bytes, "forward"))


def test_what_is_held_back_is_remarked():
    texts = [(r.unit, r.text) for r in remarks(after(7, rate_limit=1), "rate-limit", "passed")]
    assert ("layers.1", "AG held back to FREE layers.0") in texts
    assert ("layers.1", "its reduce ends before FLAT layers.0") in texts


def test_no_limit_does_nothing():
    schedule = after(7, rate_limit=None)
    assert node_names(schedule) == node_names(after(6)) and schedule.rate_limit is None


def test_a_limit_nothing_reaches_moves_nothing():
    schedule = after(7, rate_limit=9)
    assert node_names(schedule) == node_names(after(6)) and not remarks(schedule, "rate-limit")


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_order_is_idempotent(limit):
    """A second run finds nothing to move; only throttles of its own come on top."""

    def order(count: int) -> list[list[str]]:
        schedule = after(6, Framed, extra=(RateLimit(limit),) * count)
        return [[n.name for n in p.graph.nodes if n not in p.nodes("throttle")] for p in schedule.phases]

    assert order(1) == order(2)
