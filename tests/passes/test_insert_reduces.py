"""insert-reduces: FLAT after the last gradient, one RS, one AR across replicas, ACC at the end."""

import pytest
import torch
from torch import nn

from tests.capture.compare import Chain
from tests.passes.golden import after, golden, part, remarks, text


def test_golden():
    # The reduce is issued where the last gradient of the unit exists; all waits stand at the end of the phase.
    assert text(after(2), "backward") == golden("""
                                GRAD   layers.2
        AG     layers.2  288 B
                                WAIT   layers.2  for AG
                                GRAD   layers.2
                                FLAT   layers.2  288 B
                                                         RS     layers.2  288 B
                                GRAD   layers.1
        AG     layers.1  288 B
                                WAIT   layers.1  for AG
                                GRAD   layers.1
                                FLAT   layers.1  288 B
                                                         RS     layers.1  288 B
                                GRAD   layers.0
                                FLAT   layers.0  288 B
                                                         RS     layers.0  288 B
                                WAIT   layers.2  for RS
                                ACC    layers.2  144 B
                                WAIT   layers.1  for RS
                                ACC    layers.1  144 B
                                WAIT   layers.0  for RS
                                ACC    layers.0  144 B
    """)


def test_golden_hybrid():
    # Hybrid: the replicate queue waits for the scatter and reduces one shard, half of the bytes.
    lines = [line for line in text(after(2, W=4), "backward").splitlines() if "layers.2" in line]
    assert part(lines[3:]) == golden("""
            GRAD   layers.2
            FLAT   layers.2  288 B
                                     RS     layers.2  288 B
                                                             WAIT   layers.2  for RS
                                                             AR     layers.2  144 B
            WAIT   layers.2  for AR
            ACC    layers.2  144 B
    """)


@pytest.mark.parametrize(("F", "W", "kinds"), [(1, 1, []), (1, 2, ["all_reduce"]), (2, 2, ["reduce_scatter"]),
                                               (2, 4, ["reduce_scatter", "all_reduce"])])  # fmt: skip
def test_each_kind_where_it_is_needed(F, W, kinds):
    backward = after(2, F=F, W=W).backward
    for kind in ("reduce_scatter", "all_reduce"):
        assert len(backward.nodes(kind)) == (3 if kind in kinds else 0)
    assert len(backward.nodes("flatten_grads")) == len(backward.nodes("accumulate_grad")) == 3


def test_a_parameter_no_output_reaches_is_remarked():
    class Unused(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Parameter(torch.ones(3))

    schedule = after(2, Unused)
    (missed,) = remarks(schedule, "insert-reduces", "missed")
    assert (missed.unit, missed.text) == ("(root)", "no output reaches it: no gradient to reduce")


def test_presence_only_where_outputs_reach_different_parameters():
    class Two(Chain):
        def forward(self, x):
            first = self.layers[0](x)
            return self.layers[1](first), self.layers[2](first)

    assert not after(2).backward.nodes("presence")
    backward = after(2, Two).backward
    assert len(backward.nodes("presence")) == 1
    assert all(len(n.args) == 4 for n in backward.nodes("accumulate_grad"))
