"""The manager: contracts before anything runs, records, and errors that name the pass and its place."""

import dataclasses
import os
from typing import ClassVar

import pytest

import fxshard
from examples.passes.keep_best_resident import KeepBestResident
from fxshard import cli, passes
from fxshard.ir.aliasing import storage_users
from fxshard.options import Options
from tests.capture.compare import Chain, Framed, batches
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


# -- promises


class Unkept(passes.Pass):
    name: ClassVar[str] = "unkept"

    def apply(self, schedule, remarks):
        remarks.missed("layers.0", "too small")
        remarks.missed("layers.1", "too large")

    def ensures(self, schedule):
        return [f"{len(schedule.forward.all_gathers)} AllGathers in forward, not none"]


class Strict(Unkept):
    name: ClassVar[str] = "strict"
    strict: ClassVar[bool] = True

    def ensures(self, schedule):
        return ()


def test_a_promise_that_is_not_kept_is_told():
    with pytest.raises(fxshard.PassError, match=r"unkept, pass 8 of 9, does not keep its promise: 3 AllGathers in"):
        fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=[Unkept()])


def test_what_a_strict_pass_missed_is_one_error_with_all_of_it():
    with pytest.raises(fxshard.PassError) as caught:
        fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=[Strict()])
    assert "strict, pass 8 of 9, is strict and missed 2: layers.0: too small; layers.1: too large" in str(caught.value)


# -- looking on


def test_stop_after_ends_there():
    schedule = fxshard.trace(Chain(), (batches(1)[0],), F=2, stop_after="backward-prefetch")
    assert [r.text.split("{")[0] for r in schedule.history] == NAMES[:5]
    assert schedule.text("all") == after(5).text("all")


def test_a_stopped_schedule_cannot_be_compiled():
    with pytest.raises(ValueError, match=r"passes leaves out what a schedule needs to run: memory-planned"):
        fxshard.compile(Chain(), F=2, stop_after="rate-limit")


@pytest.mark.parametrize("options", [{"stop_after": "prefetch"}, {"print_after": ["prefetch"]}])
def test_a_name_that_no_pass_has_lists_those_there_are(options):
    with pytest.raises(ValueError, match=r"no pass is named 'prefetch'; there are insert-gathers, .*, plan-memory"):
        fxshard.trace(Chain(), (batches(1)[0],), F=2, **options)


def test_print_after_prints_what_changed(capsys):
    fxshard.trace(Chain(), (batches(1)[0],), F=2, rate_limit=None, print_after=["backward-prefetch", "rate-limit"])
    printed = capsys.readouterr().out
    unchanged = "after rate-limit{limit=None, limit_bytes=None}: no change"
    assert printed == f"after backward-prefetch{{depth=1}}\n{after(5)}\n\n{unchanged}\n\n"


def test_each_record_holds_the_schedule_after_it():
    history = after(8).history
    for count, record in enumerate(history, 1):
        assert record.lines[-1] == after(count).text().splitlines()[-1]
    assert history[3].lines != history[4].lines
    assert (history[0].removed, history[3].removed) != (0, 0)


def test_verify_each_may_be_put_off_to_the_end():
    """A pass breaks the schedule and the next one mends it: valid in, valid out, or only at the end."""

    class Break(passes.Pass):
        name: ClassVar[str] = "break"

        def apply(self, schedule, remarks):
            self.swap(schedule, "free", "first_use")

        @staticmethod
        def swap(schedule, kind, use):
            free = schedule.forward.one(kind, "layers.1")
            getattr(schedule.forward, use)("layers.1").prepend(free)

    class Mend(passes.Pass):
        name: ClassVar[str] = "mend"

        def apply(self, schedule, remarks):
            free = schedule.forward.one("free", "layers.1")
            max(storage_users(free.args[0])).append(free)

    def order(default):
        return [*default[:3], Break(), Mend(), *default[3:]]

    with pytest.raises(fxshard.ScheduleError, match="break, pass 4 of 10"):
        fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=order)
    mended = fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=order, verify_each=False)
    assert mended.text("all").split("units\n")[1] == after(8).text("all").split("units\n")[1]
    with pytest.raises(fxshard.ScheduleError, match="used_only_while_gathered"):
        fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=lambda p: [*p[:3], Break(), *p[3:]], verify_each=False)


# -- passes as text


@pytest.mark.parametrize("p", [*DEFAULT, passes.RateLimit(None, 4096), passes.BackwardPrefetch(3)], ids=str)
def test_what_a_pass_prints_is_read_back(p):
    assert passes.parse(str(p)) == p


def test_a_pass_of_another_module_is_named_by_it():
    text = "examples.passes.keep_best_resident:KeepBestResident{budget_bytes=4096}"
    assert passes.parse(text) == KeepBestResident(4096)
    assert passes.parse("backward-prefetch") == passes.BackwardPrefetch()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backward-prefech", "there is no pass 'backward-prefech'. Did you mean 'backward-prefetch'?"),
        ("backward-prefetch{deep=1}", "has no option 'deep'; allowed are depth"),
        ("backward-prefetch{depth=1", "the brace is not closed"),
        ("backward-prefetch{depth=x}", "options are name=value, with Python literals"),
        ("backward-prefetch{1}", "options are written name=value"),
        ("no_such_module:Pass", "module 'no_such_module' cannot be imported"),
        ("fxshard:Schedule", "'Schedule' of fxshard is no fxshard.passes.Pass"),
        ("examples.passes.keep_best_resident:KeepBestResident{budget_bytes=-1}", "a number of bytes was expected"),
    ],
)
def test_text_that_is_no_pass_is_refused(text, message):
    with pytest.raises(ValueError) as caught:
        passes.parse(text)
    assert message in str(caught.value)


# -- reproducers


@dataclasses.dataclass(frozen=True)
class FreeTooEarly(passes.Pass):
    name: ClassVar[str] = "free-too-early"

    unit: str = "layers.1"

    def apply(self, schedule, remarks):
        schedule.forward.first_use(self.unit).prepend(schedule.forward.one("free", self.unit))


def test_a_failing_pass_leaves_a_file_that_runs_it_again(capsys):
    with pytest.raises(fxshard.ScheduleError) as caught:
        fxshard.trace(Chain(), (batches(1)[0],), F=2, passes=lambda p: [*p[:5], FreeTooEarly("layers.2"), *p[5:]])
    (note,) = caught.value.__notes__
    path = note.split()[-1]
    try:
        with pytest.raises(fxshard.ScheduleError) as again:
            passes.replay(path)
        first = str(caught.value).splitlines()
        assert [line for line in str(again.value).splitlines() if "after  " not in line] == [
            line for line in first if "after  " not in line
        ]
        assert "free-too-early{unit='layers.2'}, pass 6 of 6" in str(again.value)
        assert note == f"  again   fxshard verify {path}" and cli.main(["verify", path]) == 1
        assert "free-too-early{unit='layers.2'}, pass 6 of 6" in capsys.readouterr().err
    finally:
        os.remove(path)


def test_a_file_that_is_no_reproducer_is_refused(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(after(8).to_json())
    with pytest.raises(ValueError, match="is no reproducer"):
        passes.replay(str(path))


# -- bisecting


def captured() -> fxshard.Schedule:
    return fxshard.trace(Framed(), (batches(1)[0],), F=2, passes=lambda p: [])


def test_bisect_names_the_pass_and_the_move_that_break_a_check():
    """AG layers.0 may not be issued before RS layers.1 is: backward-prefetch does that, by its third move."""

    def check(schedule):
        gather = schedule.backward.one("all_gather", "layers.0")
        return schedule.backward.one("reduce_scatter", "layers.1") < gather

    schedule = captured()
    before = schedule.text("all")
    culprit = passes.bisect(DEFAULT, schedule, check)
    assert (culprit.passed, culprit.position) == ("backward-prefetch{depth=1}", 5)
    assert "AG layers.0 to before WAIT layers.1" in culprit.moved and culprit.move == 3
    assert culprit.error == "the check returned False"
    assert schedule.text("all") == before, "the captured schedule is left as it is"


def test_bisect_finds_a_pass_that_breaks_the_schedule():
    culprit = passes.bisect([*DEFAULT[:5], FreeTooEarly(), *DEFAULT[5:]], captured(), lambda s: True)
    assert culprit.position == 6 and culprit.move is None
    assert "used_only_while_gathered" in culprit.error


def test_bisect_tells_what_a_check_raised():
    def check(schedule):
        if schedule.resident:
            raise KeyError("a resident")

    culprit = passes.bisect(DEFAULT, captured(), check)
    assert culprit.passed == "keep-root-resident{everything=False}" and culprit.error == "KeyError: 'a resident'"


def test_bisect_of_a_check_that_holds():
    assert passes.bisect(DEFAULT, captured(), lambda s: True) is None


def test_bisect_of_a_check_that_never_holds():
    culprit = passes.bisect(DEFAULT, captured(), lambda s: False)
    assert culprit.passed == "the passes that are always needed"
