"""keep-resident: the units chosen by name stay gathered from forward to backward, the others do not."""

from fxshard.passes import KeepResident
from tests.capture.compare import Framed
from tests.passes.golden import after, node_names, remarks


def test_the_last_pattern_that_fits_counts():
    schedule = after(3, Framed, extra=(KeepResident((("layers.*", False), ("layers.1", True))),))
    assert schedule.resident == {"layers.0", "layers.2"}
    assert [r.unit for r in remarks(schedule, "keep-resident", "passed")] == ["layers.0", "layers.2"]
    gathered = [n.meta["fxshard"].flat for n in schedule.backward.all_gathers]
    assert sorted(gathered) == ["(root).1", "layers.1"]


def test_what_is_not_kept_is_remarked():
    schedule = after(3, Framed, extra=(KeepResident((("(root)*", False),)),))
    (missed,) = remarks(schedule, "keep-resident", "missed")
    assert (missed.unit, missed.text) == ("(root).0", "backward does not read '(root).0': freed after forward")


def test_what_stays_already_and_what_no_pattern_fits_are_left_alone():
    schedule = after(4, Framed, extra=(KeepResident((("(root).1", False), ("x", False))),))
    assert node_names(schedule) == node_names(after(4, Framed))
    assert not remarks(schedule, "keep-resident", "missed")
