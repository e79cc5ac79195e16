"""Buckets in pictures: one bar each, memory up to the last member's FREE, the arrow of the throttle before it."""

from __future__ import annotations

import pytest

import fxshard
from fxshard.ir.nodes import bytes_text
from fxshard.viz.lanes import short_names
from fxshard.viz.timeline import lay_out
from tests.capture.compare import Framed, batches
from tests.runtime.test_bucket_runs import merging


def merged(**options) -> fxshard.Schedule:
    chosen = {"F": 2, "forward_prefetch": 2, "backward_prefetch": 2, "rate_limit": 4, "passes": merging(members=2)}
    return fxshard.trace(Framed(6), (batches(1)[0],), **{**chosen, **options})


def test_one_bar_a_bucket_with_all_its_bytes():
    timeline = lay_out(merged())
    (lane,) = [lane for lane in timeline.lanes if lane.queue == "unshard"]
    forward = [(bar.name, bar.num_bytes, bar.unit) for bar in lane.bars if bar.phase == "forward"]
    assert forward[1] == ("layers.1 + layers.2", 576, "layers.1")
    assert sum(size for _, size, _ in forward) == sum(f.full_bytes for f in merged().flats.values())
    assert "merge-small-gathers" in lane.bars[1].passes


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"rate_limit": None}], ids=str)
def test_the_memory_drawn_is_the_memory_planned(options):
    schedule = merged(**options)
    timeline = lay_out(schedule)
    assert timeline.gathered.peak[1] == schedule.memory.peak_gathered_bytes
    assert timeline.gathered.points[-1][1] == schedule.memory.resident_bytes


def test_the_arrow_of_its_throttle():
    arrows = [arrow.name for arrow in lay_out(merged(rate_limit=2)).arrows if arrow.kind == "limit"]
    assert arrows[:2] == ["layers.1 + layers.2", "layers.3 + layers.4"]


def test_names_are_shortened_alike():
    assert short_names("model.layers.3 + model.layers.4")[-1] == "3 + 4"
    assert short_names("model.layers.3 + 7 more") == ["model.layers.3 + 7 more"]


def test_it_is_drawn(tmp_path):
    schedule = merged(rate_limit=None, passes=merging())
    schedule.render(str(tmp_path / "merged.svg"))
    svg = (tmp_path / "merged.svg").read_text()
    size = bytes_text(sum(f.full_bytes for f in schedule.flats.values()))
    assert f"(root).0 + 7 more, {size}, forward" in svg
