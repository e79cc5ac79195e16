"""The lossless form: what is written reads back as the same schedule, in another process too."""

import json
import subprocess
import sys

import pytest
import torch

import fxshard
from fxshard import Schedule
from fxshard.ir.nodes import info
from fxshard.ir.verify import verify
from tests.capture.compare import Framed, batches
from tests.ir.test_corruptions import MODELS, traced
from tests.passes.golden import after


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_reads_back(name):
    schedule = traced(name)
    written = schedule.to_json()
    again = Schedule.from_json(written)
    assert again.to_json() == written
    for level in ("units", "communication", "all"):
        assert again.text(level) == schedule.text(level)
    verify(again)
    assert not fxshard.diff(schedule, again)
    for phase, other in zip(schedule.phases, again.phases):
        assert [n.name for n in phase.graph.nodes] == [n.name for n in other.graph.nodes]
        assert [n.target for n in phase.graph.nodes] == [n.target for n in other.graph.nodes]
        for a, b in zip(phase.graph.nodes, other.graph.nodes):
            assert [n.name for n in a.all_input_nodes] == [n.name for n in b.all_input_nodes]
            assert info(a) == info(b) and a.meta.get("slot") == b.meta.get("slot")
            value, other_value = a.meta.get("val"), b.meta.get("val")
            if isinstance(value, torch.Tensor):
                assert (value.shape, value.dtype, value.stride()) == (
                    other_value.shape, other_value.dtype, other_value.stride(),
                )  # fmt: skip


@pytest.mark.parametrize("count", range(9))
def test_passes_go_on_where_they_were(count):
    """A schedule written after some passes, read, and given to the others is what it would have been."""
    default = fxshard.passes.default_passes(fxshard.Options())
    read = Schedule.from_json(after(count).to_json())
    fxshard.passes.run(default[count:], read)
    whole = after(8)
    assert read.text("all") == whole.text("all")
    assert json.loads(read.to_json())["phases"] == json.loads(whole.to_json())["phases"]


def test_it_is_the_same_in_another_process(tmp_path):
    program = (
        "import sys, fxshard\nfrom tests.capture.compare import Framed, batches\n"
        "open(sys.argv[1], 'w').write(fxshard.trace(Framed(), (batches(1)[0],), F=2).to_json())"
    )
    path = tmp_path / "written"
    subprocess.run(
        [sys.executable, "-c", program, str(path)], check=True, timeout=300, env=env_with(PYTHONHASHSEED="1")
    )
    assert path.read_text() == fxshard.trace(Framed(), (batches(1)[0],), F=2).to_json()


def env_with(**variables: str) -> dict[str, str]:
    import os

    return {**os.environ, **variables}


def test_symbolic_sizes_keep_their_expressions():
    schedule = fxshard.trace(Framed(), (batches(1)[0],), F=2, dynamic=True)
    written = schedule.to_json()
    assert '"symbol"' in written
    assert Schedule.from_json(written).to_json() == written


def test_numbers_json_does_not_have():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            mask = torch.ones(8, dtype=torch.bool)
            return self.layer(x).masked_fill(mask, float("-inf")).nan_to_num(1e-3).to(torch.complex64) * (1 + 2j)

    schedule = fxshard.trace(Odd(), (batches(1)[0],), F=2, units="none")
    written = schedule.to_json()
    assert '"float": "-inf"' in written
    assert Schedule.from_json(written).to_json() == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a schedule: "),
        ("[]", "its format is not 'fxshard schedule'"),
        ('{"format": "fxshard schedule", "version": 99}', "of version 99; this fxshard reads version 3"),
    ],
)
def test_what_is_no_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Schedule.from_json(text)


def test_an_operator_that_is_not_registered_is_named():
    document = json.loads(after(8).to_json())
    node = next(n for n in document["phases"][0]["nodes"] if n["op"] == "call_function" and "aten" in n["target"])
    node["target"] = "torch.ops.elsewhere.thing.default"
    with pytest.raises(ValueError, match=r"torch\.ops\.elsewhere\.thing\.default is not registered here"):
        Schedule.from_json(json.dumps(document))
