"""insert-frees: one FREE after the last reader of a gathered buffer, through views."""

from torch import nn

from fxshard.passes import InsertFrees, InsertGathers
from tests.capture.compare import Chain
from tests.passes.golden import after, golden, remarks, text


def test_golden():
    # A unit's buffer is only needed by its matrix product: what follows in the block runs without it.
    schedule = after(3)
    assert text(schedule, "forward") == golden("""
        AG     layers.0  288 B
                                WAIT   layers.0  for AG
                                FWD    layers.0
                                FREE   layers.0
                                FWD    layers.0
        AG     layers.1  288 B
                                WAIT   layers.1  for AG
                                FWD    layers.1
                                FREE   layers.1
                                FWD    layers.1
        AG     layers.2  288 B
                                WAIT   layers.2  for AG
                                FWD    layers.2
                                FREE   layers.2
                                FWD    layers.2
    """)


def test_a_group_of_one_has_nothing_to_free():
    schedule = after(3, F=1)
    assert not schedule.forward.frees and not remarks(schedule, "insert-frees")


def test_reads_through_a_chain_of_views_hold_the_buffer():
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            late = self.layers[0].weight.t()[:, 3].unsqueeze(0)
            for layer in self.layers:
                x = layer(x)
            return x + late

    schedule = after(2, Views, extra=(InsertFrees(),))
    nodes = list(schedule.forward.graph.nodes)
    (free,) = schedule.forward.nodes("free", "layers.0")
    add = next(n for n in reversed(nodes) if "add" in str(n.target))
    assert nodes.index(add) < nodes.index(free)


def test_it_needs_only_gathers():
    schedule = after(0, extra=(InsertGathers(), InsertFrees()))
    assert [len(p.frees) for p in schedule.phases] == [3, 2]


def test_one_free_a_gather_and_phase():
    for phase in after(3, Chain).phases:
        assert [n.meta["fxshard"].flat for n in phase.frees] == [n.meta["fxshard"].flat for n in phase.all_gathers]
