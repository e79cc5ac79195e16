"""insert-gathers: shard, AG, WAIT, views before the first use, once a phase."""

import torch

import fxshard
from fxshard.passes import InsertGathers
from tests.capture.compare import Framed
from tests.passes.golden import after, golden, node_names, remarks, text


def test_golden():
    # Each gather stands right before its WAIT: nothing is hidden yet. Backward has no gather of layers.0, because the
    # gradient of the model's input is not asked for.
    schedule = after(1)
    assert text(schedule, "forward") == golden("""
        AG     layers.0  288 B
                                WAIT   layers.0  for AG
                                FWD    layers.0
        AG     layers.1  288 B
                                WAIT   layers.1  for AG
                                FWD    layers.1
        AG     layers.2  288 B
                                WAIT   layers.2  for AG
                                FWD    layers.2
    """)
    assert text(schedule, "backward") == golden("""
                                GRAD   layers.2
        AG     layers.2  288 B
                                WAIT   layers.2  for AG
                                GRAD   layers.2
                                GRAD   layers.1
        AG     layers.1  288 B
                                WAIT   layers.1  for AG
                                GRAD   layers.1
                                GRAD   layers.0
    """)


def test_a_group_of_one_gathers_nothing_and_says_so():
    schedule = after(1, F=1)
    assert not schedule.forward.all_gathers and not schedule.forward.waits
    assert [(r.unit, r.kind, r.text) for r in remarks(schedule, "insert-gathers")][:3] == [
        (f"layers.{i}", "passed", "held whole") for i in range(3)
    ]


def test_a_cast_precedes_the_gather_which_moves_the_smaller_dtype():
    schedule = after(1, mixed_precision=fxshard.MixedPrecision(param=torch.bfloat16))
    for gather in schedule.forward.all_gathers:
        assert gather.prev.meta["fxshard"].kind == "cast_shard"
        assert gather.meta["fxshard"].num_bytes == 160  # 72 elements of 2 bytes, each half aligned to 16 bytes


def test_idempotent():
    assert node_names(after(1, Framed, extra=(InsertGathers(),))) == node_names(after(1, Framed))
