"""merge-small-gathers: what it merges, what it leaves alone and says why, and its page in docs/."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxshard
from examples.passes.merge_small_gathers import MergeSmallGathers
from fxshard.ir import Phase, Schedule
from tests.capture.compare import Framed, batches
from tests.passes.golden import after, golden, node_names, part, remarks, text

ROOT = Path(__file__).parent.parent.parent
X = (batches(1)[0],)
NAME = "merge-small-gathers"


def merged(merge: MergeSmallGathers, model: nn.Module | None = None, **options) -> Schedule:
    """After the prefetching passes and `merge`, without a rate limit."""
    chosen = {"F": 2, "rate_limit": None, "passes": lambda p: [*p[:-2], merge, *p[-2:]], **options}
    return fxshard.trace(model or Framed(5), X, **chosen)


def gathered(phase: Phase) -> list[tuple[str, ...]]:
    return [n.meta["fxshard"].flats for n in phase.all_gathers]


def test_golden():
    # Of three units two fit into a bucket of 600 bytes; backward gathers in its own order, and each bucket stands where
    # its first member's gather stood, prefetched as that was. Members are in registration order.
    schedule = after(6, extra=(MergeSmallGathers(bucket_bytes=600),))
    assert text(schedule, "forward") == golden("""
        AG     layers.0 + layers.1  576 B
                                           WAIT   layers.0  for AG
                                           FWD    layers.0
                                           FREE   layers.0
                                           FWD    layers.0
        AG     layers.2             288 B
                                           WAIT   layers.1  for AG
                                           FWD    layers.1
                                           FREE   layers.1
                                           FWD    layers.1
                                           WAIT   layers.2  for AG
                                           FWD    layers.2
                                           FREE   layers.2
                                           FWD    layers.2
    """)
    lines = text(schedule, "backward").splitlines()
    assert part([line for line in lines if "AG" in line]) == golden("""
        AG     layers.1 + layers.2  576 B
                                           WAIT   layers.2  for AG
                                           WAIT   layers.1  for AG
    """)


def test_a_bucket_is_as_large_as_allowed_and_no_larger():
    # The root's head has 5 outputs: 192 bytes; every other unit 288.
    for size, expected in ((479, [1] * 7), (480, [1] * 5 + [2]), (576, [2, 2, 2, 1]), (864, [3, 3, 1]), (1920, [7])):
        forward = merged(MergeSmallGathers(bucket_bytes=size)).forward
        assert list(map(len, gathered(forward))) == expected
        assert all(n.meta["fxshard"].num_bytes <= size for n in forward.all_gathers if n.meta["fxshard"].members)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_bucket_has_as_many_members_as_allowed(members):
    forward = merged(MergeSmallGathers(members=members)).forward
    assert max(map(len, gathered(forward))) == members and sum(map(len, gathered(forward))) == 7


class Mixed(nn.Module):
    """Small, small, large, small, small: the large one is between."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((8, 8), (8, 8), (8, 64), (64, 8), (8, 8), (8, 8))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_large_gather_stays_alone_and_ends_the_run():
    schedule = merged(MergeSmallGathers(small_bytes=300), Mixed())
    names = [f"layers.{i}" for i in range(6)]
    assert gathered(schedule.forward) == [(*names[:2],), (names[2],), (names[3],), (*names[4:],)]
    assert gathered(schedule.backward)[0] == (*names[4:],)
    said = [(r.unit, r.text) for r in remarks(schedule, NAME, "missed")]
    assert ("layers.2", "2.2 KiB is not small") in said and {unit for unit, _ in said} == {"layers.2", "layers.3"}


def test_what_was_merged_is_remarked_and_recorded():
    schedule = merged(MergeSmallGathers(bucket_bytes=576))
    texts = [(r.unit, r.text) for r in remarks(schedule, NAME, "passed")]
    assert texts[0] == ("layers.0", "gathered with AG (root).0 in forward")
    (record,) = [r for r in schedule.history if r.text.startswith(NAME)]
    assert record.text == f"{NAME}{{bucket_bytes=576, small_bytes=262144, members=None}}"
    assert record.moved == record.removed - record.added == len(texts)


def test_after_the_rate_limit_a_throttle_ends_the_run():
    schedule = fxshard.trace(Framed(5), X, F=2, passes=[MergeSmallGathers()])
    assert gathered(schedule.forward)[:2] == [("(root).0", "layers.0"), ("layers.1",)]
    assert "LIMIT layers.1 stands between" in " ".join(r.text for r in remarks(schedule, NAME, "missed"))
    without = fxshard.trace(Framed(5), X, F=2)
    assert schedule.rate_limit == without.rate_limit == 2  # the manager has verified both


@pytest.mark.parametrize("merge", [MergeSmallGathers(small_bytes=0), MergeSmallGathers(members=1)], ids=str)
def test_nothing_small_or_nothing_allowed_moves_nothing(merge):
    assert node_names(merged(merge)) == node_names(fxshard.trace(Framed(5), X, F=2, rate_limit=None))


def test_no_gathers_nothing_to_do():
    schedule = merged(MergeSmallGathers(), F=1)
    assert not schedule.forward.all_gathers and not remarks(schedule, NAME)


@pytest.mark.parametrize("size", [300, 600, 900, 2000])
def test_idempotent(size):
    merge = MergeSmallGathers(bucket_bytes=size)
    once = merged(merge)
    twice = merged(merge, passes=lambda p: [*p[:-2], merge, merge, *p[-2:]])
    assert list(map(gathered, twice.phases)) == list(map(gathered, once.phases))


def test_waits_and_frees_and_operators_keep_their_order():
    without = [n for n in node_names(fxshard.trace(Framed(5), X, F=2, rate_limit=None))[1] if "all_gather" not in n]
    assert [n for n in node_names(merged(MergeSmallGathers()))[1] if "all_gather" not in n] == without


def test_its_page_shows_what_it_does():
    page = (ROOT / "docs/passes/merge_small_gathers.md").read_text()
    ((_, code), (_, output)) = re.findall(r"^```(python|text)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
