"""The manager: contracts before anything runs, records, and errors that name the pass and its place."""

import dataclasses
from typing import ClassVar

import pytest

import fxshard
from fxshard import passes
from fxshard.options import Options
from tests.capture.compare import Chain, batches
from tests.passes.golden import after

DEFAULT = passes.default_passes(Options())
NAMES = [
    "insert-gathers", "insert-reduces", "insert-frees", "keep-root-resident", "backward-prefetch", "forward-overlap",
    "rate-limit", "plan-memory",
]  # fmt: skip


def test_the_default_pipeline():
    assert [p.name for p in DEFAULT] == NAMES
    assert all(dataclasses.is_dataclass(p) and p.__dataclass_params__.frozen for p in DEFAULT)


def test_options_switch_passes():
    def names(**options) -> list[str]:
        return [p.name for p in passes.default_passes(Options(**options))]

    assert "backward-prefetch" not in names(backward_prefetch=0) and "forward-overlap" not in names(forward_prefetch=0)
    assert "keep-root-resident" not in names(keep_root_resident=False)
    kept = passes.default_passes(Options(keep_root_resident=False, reshard_after_forward=False))
    assert passes.KeepRootResident(everything=True) in kept


@pytest.mark.parametrize("p", DEFAULT, ids=str)
def test_a_pass_states_its_contract(p):
    alone = [p]
    if not p.requires:
        passes.manager.check_contracts(alone)
        return
    with pytest.raises(fxshard.PassError) as caught:
        passes.manager.check_contracts(alone)
    assert f"pass 1 '{p.name}' requires" in str(caught.value)
    assert all(r in str(caught.value) for r in p.requires)


def test_every_culprit_is_named_before_anything_runs():
    ran = []

    class Witness(passes.Pass):
        name: ClassVar[str] = "witness"

        def apply(self, schedule, remarks):
            ran.append(schedule)

    with pytest.raises(fxshard.PassError) as caught:
        fxshard.trace(
            Chain(), (batches(1)[0],), F=2, passes=lambda p: [Witness(), p[2], p[0], p[6]],
        )  # fmt: skip
    message = str(caught.value)
    assert "pass 2 'insert-frees' requires gathers-inserted" in message
    assert "pass 4 'rate-limit' requires reduces-inserted" in message
    assert "insert-gathers" not in message and ran == []


def test_records_tell_what_each_pass_did():
    history = after(8).history
    assert [record.text.split("{")[0] for record in history] == NAMES
    assert history[4].text == "backward-prefetch{depth=1}" and history[4].moved == 2
    assert history[0].added > 0 and history[4].added == 0 and all(r.seconds >= 0 for r in history)


def test_a_users_pass_goes_before_plan_memory():
    class Mine(passes.Pass):
        name: ClassVar[str] = "mine"

        def apply(self, schedule, remarks):
            remarks.missed("layers.1", "only looking")

    schedule = fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=[Mine()])
    assert [r.text.split("{")[0] for r in schedule.history] == [*NAMES[:-1], "mine", "plan-memory"]
    assert [(r.by, r.unit) for r in schedule.remarks if r.kind == "missed"] == [("mine", "layers.1")]


def test_a_pass_without_apply_and_a_failing_one_are_named():
    class Empty(passes.Pass):
        name: ClassVar[str] = "empty"

    with pytest.raises(
        fxshard.PassError, match=r"empty, pass 8 of 9, failed: NotImplementedError: pass 'empty' has no"
    ):
        fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=[Empty()])
