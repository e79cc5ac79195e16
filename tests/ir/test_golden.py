"""Golden texts of whole schedules: the order of events that the FSDP paper's Figure 5 tells, and its variants.

Three units as in the figure: the root (0), which begins and ends forward, and two blocks inside of it.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

import fxshard
from fxshard.ir.text import events
from tests.capture.compare import Block
from tests.passes.golden import golden, text

WIDTH = 8


class Figure5(nn.Module):
    """Unit 0 is the root, split around blocks 1 and 2: it works first, between them, and in backward last."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.zero, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.rest = Block(WIDTH), nn.ModuleList(Block(WIDTH) for _ in range(blocks - 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.one(self.zero(x)))
        for block in self.rest:
            x = block(x)
        return x


class EncoderDecoder(nn.Module):
    """Both decoder layers read what the encoder's last layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x)
        for layer in self.decoder:
            y = layer(y) * x
        return y


PLAIN = {"forward_prefetch": 0, "backward_prefetch": 0}


def trace(model: nn.Module = None, inputs: int = 1, F: int = 2, W: int | None = None, **options) -> fxshard.Schedule:
    batch = torch.zeros(2, WIDTH, requires_grad=True)
    return fxshard.trace(model or Figure5(), (batch,) * inputs, F=F, W=W, units=Block, **options)


def told(schedule: fxshard.Schedule) -> str:
    """`AG0 F0 AG1 F1 | AG2 B2 RS2`: the paper's own way to write it."""
    names = {"(root)": "0", "one": "1", "rest.0": "2", "rest.1": "3"}
    phases = [" ".join(f"{label}{names.get(name, name)}" for label, name in events(p)) for p in schedule.phases]
    return " | ".join(phases)


def limits(schedule: fxshard.Schedule) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in text(schedule, "forward").splitlines() if "LIMIT" in line]


def test_fsdp_without_prefetch():
    # Figure 5 to the letter: RS(u) is issued before AG(u-1), both are exposed; the root is not gathered in backward.
    assert told(trace(**PLAIN)) == "AG0 F0 AG1 F1 F0 AG2 F2 | AG2 B2 RS2 B0 AG1 B1 RS1 B0 RS0"


def test_a_root_that_is_not_resident():
    schedule = trace(keep_root_resident=False, **PLAIN)
    assert told(schedule) == "AG0 F0 AG1 F1 F0 AG2 F2 | AG2 B2 RS2 AG0 B0 AG1 B1 RS1 B0 RS0"


def test_fsdp_without_prefetch_in_full():
    assert text(trace(**PLAIN), "backward") == golden("""
                              GRAD   rest.0
        AG     rest.0  288 B
                              WAIT   rest.0  for AG
                              GRAD   rest.0
                              FREE   rest.0
                              GRAD   rest.0
                              FLAT   rest.0  288 B
                                                     RS     rest.0  288 B
                              GRAD   (root)
                              GRAD   one
        AG     one     288 B
                              WAIT   one     for AG
                              GRAD   one
                              FREE   one
                              GRAD   one
                              FLAT   one     288 B
                                                     RS     one     288 B
                              GRAD   (root)
                              FREE   (root)
                              GRAD   (root)
                              WAIT   rest.0  for RS
                              ACC    rest.0  144 B
                              FLAT   (root)  576 B
                                                     RS     (root)  576 B
                              WAIT   one     for RS
                              ACC    one     144 B
                              WAIT   (root)  for RS
                              ACC    (root)  288 B
    """)


def test_fsdp_with_prefetch():
    # Backward: AG1 before B2 and so before RS2. Forward: each AG under the work before it.
    assert told(trace()) == "AG0 AG1 F0 AG2 F1 F0 F2 | AG2 AG1 B2 RS2 B0 B1 RS1 B0 RS0"


def test_fsdp_with_prefetch_in_full():
    # Without the numbers of operators, which differ between versions of torch.
    assert re.sub(r"\d+ ops?", "ops", trace().text()) == golden("""
    schedule  W=2  F=2  replicas=1
    # insert-gathers
    # insert-reduces
    # insert-frees
    # keep-root-resident{everything=False}
    # backward-prefetch{depth=1}
    # forward-overlap{depth=1}
    # rate-limit{limit=2, limit_bytes=None}
    # plan-memory
    units
      (root)     4 parameters           144 float32  288 B a rank  resident
      one        2 parameters            72 float32  144 B a rank
      rest.0     2 parameters            72 float32  144 B a rank
    forward
      unshard               compute                reduce
      AG     (root)  576 B
      AG     one     288 B
                            WAIT   (root)  for AG
                            FWD    (root)  ops
      AG     rest.0  288 B
                            WAIT   one     for AG
                            FWD    one     ops
                            FREE   one
                            FWD    one     ops
                            FWD    (root)  ops
                            WAIT   rest.0  for AG
                            FWD    rest.0  ops
                            FREE   rest.0
                            FWD    rest.0  ops
    backward
      unshard               compute                reduce
      AG     rest.0  288 B
                            GRAD   rest.0  ops
      AG     one     288 B
                            WAIT   rest.0  for AG
                            GRAD   rest.0  ops
                            FREE   rest.0
                            GRAD   rest.0  ops
                            FLAT   rest.0  288 B
                                                   RS     rest.0  288 B
                            GRAD   (root)  ops
                            GRAD   one     ops
                            WAIT   one     for AG
                            GRAD   one     ops
                            FREE   one
                            GRAD   one     ops
                            FLAT   one     288 B
                                                   RS     one     288 B
                            GRAD   (root)  ops
                            FREE   (root)
                            GRAD   (root)  ops
                            WAIT   rest.0  for RS
                            ACC    rest.0  144 B
                            FLAT   (root)  576 B
                                                   RS     (root)  576 B
                            WAIT   one     for RS
                            ACC    one     144 B
                            WAIT   (root)  for RS
                            ACC    (root)  288 B
    memory  arena 1.1 KiB  residents 576 B  peak gathered 1.1 KiB  peak gradients 864 B
""")


def test_hybrid():
    # RS in the shard group, then AR among the replicas on a queue of its own.
    assert told(trace(W=4)) == "AG0 AG1 F0 AG2 F1 F0 F2 | AG2 AG1 B2 RS2 AR2 B0 B1 RS1 AR1 B0 RS0 AR0"


def test_ddp():
    # F = 1: nothing is gathered; one AR a unit, as soon as its gradients are there.
    assert told(trace(F=1, W=2)) == "F0 F1 F0 F2 | B2 AR2 B0 B1 AR1 B0 AR0"


def test_rate_limit_one():
    # The root is resident and does not count. One other at a time: each AG stands behind the FREE before it.
    schedule = trace(Figure5(3), rate_limit=1)
    assert told(schedule) == "AG0 AG1 F0 F1 AG2 F0 F2 AG3 F3 | AG3 B3 AG2 RS3 B2 AG1 RS2 B0 B1 RS1 B0 RS0"
    assert limits(schedule) == ["after FREE one", "after FREE rest.0"]


def test_rate_limit_two():
    # Two in flight is the least that still overlaps: the order is that of prefetching, and streams are held to it.
    schedule = trace(Figure5(3), rate_limit=2)
    assert told(schedule) == told(trace(Figure5(3), rate_limit=None))
    assert told(schedule) == "AG0 AG1 F0 AG2 F1 F0 AG3 F2 F3 | AG3 AG2 B3 RS3 AG1 B2 RS2 B0 B1 RS1 B0 RS0"
    assert limits(schedule) == ["after FREE one"]


def test_encoder_decoder():
    # Backward in the true order of use: the decoder from its end, then the encoder from its end.
    forward, backward = told(trace(EncoderDecoder(), inputs=2)).split(" | ")
    assert forward == golden("""
        AGencoder.0 AGencoder.1 Fencoder.0 AGdecoder.0 Fencoder.1 AGdecoder.1 Fdecoder.0 Fdecoder.1
    """)
    assert backward.split(" RSdecoder.0 ") == [
        "AGdecoder.1 AGdecoder.0 Bdecoder.1 RSdecoder.1 AGencoder.1 Bdecoder.0",
        "AGencoder.0 Bencoder.1 RSencoder.1 Bencoder.0 RSencoder.0",
    ]
