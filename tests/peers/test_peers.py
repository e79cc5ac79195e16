"""What a training script asks of data parallelism, asked of fxshard; and the table of docs/peers.md, of all four systems."""

from __future__ import annotations

import re

import pytest
import torch

from tests.distributed.harness import RankFailure, Ranks
from tests.peers.features import FEATURES, REFUSED, ask
from tests.peers.systems import SYSTEMS
from tests.peers.table import BEGIN, END, PAGE, rows

FEW = (
    "synced_and_unsynced_in_any_order",
    "norms_in_fp32_beside_bf16",
    "an_infinity_on_one_rank_skips_the_step_on_all",
    "unfreezing_later",
    "weights_tied_across_units",
    "an_optimizer_of_whole_matrices",
    "hooks_after_accumulation_see_what_was_reduced",
    "a_method_beside_forward",
    "deferred_initialisation_with_the_bits_of_eager",
    "a_sharded_checkpoint_loads_under_another_F",
    "optimizer_state_saved_whole_resumes_plainly",
)
"""What is asked in every run; everything in the full one."""


@pytest.mark.parametrize(
    "feature",
    [pytest.param(f, marks=[] if f in FEW else pytest.mark.full) for f in FEATURES if f not in REFUSED],
)
def test_fxshard_does_it(ranks: Ranks, feature: str) -> None:
    assert ranks.run(4, ask, "fxshard", feature) == [True] * 4


@pytest.mark.parametrize("feature", REFUSED)
def test_fxshard_refuses_it(ranks: Ranks, feature: str) -> None:
    with pytest.raises(RankFailure) as refused:
        ranks.run(4, ask, "fxshard", feature)
    assert REFUSED[feature] in str(refused.value.error) and len(refused.value.texts) == 4


def written() -> list[str]:
    page = PAGE.read_text()
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)].splitlines()


def test_the_page_has_a_line_for_each_feature() -> None:
    lines = [line.split(" | ") for line in written() if line.startswith("| ")]
    assert lines[0][1:] == [*list(SYSTEMS)[:-1], f"{list(SYSTEMS)[-1]} |"]
    assert [line[0].removeprefix("| ").replace(" ", "_") for line in lines[1:]] == list(FEATURES)
    answers = {line[0].removeprefix("| ").replace(" ", "_"): line[1] for line in lines[1:]}
    assert {feature for feature, answer in answers.items() if answer != "yes"} == REFUSED.keys()
    assert all(answers[feature].startswith("error") for feature in REFUSED)


@pytest.mark.full
def test_the_page_is_what_the_systems_do(ranks: Ranks) -> None:
    """Peers differ from version to version: theirs are compared on the one that the page names."""
    found, lines = rows(ranks), written()
    if torch.__version__ not in lines[-1]:
        found, lines = ([line.split(" | ")[:2] for line in text] for text in (found, lines[: len(found)]))  # type: ignore[misc]
    assert [outcome(line) for line in lines[: len(found)]] == [outcome(line) for line in found]


def outcome(line: str) -> str:
    """A line without how a system fails: where its ranks are in different collectives, that is a matter of time."""
    return re.sub(r"error \([\w ]+\)|\*\*hangs\*\*", "fails", line)
