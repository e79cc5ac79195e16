"""What a step communicates and in which order, on the graph and as executed."""

import pytest
import torch
from torch import Tensor, nn

import fxshard
from fxshard.ir import Phase, Schedule
from tests.capture.compare import Chain, Framed, batches, check, events, mean_of_squares, pair

X = batches(1)[0]


def count(schedule: Schedule) -> dict[str, dict[str, int]]:
    """Communication nodes by phase and kind, FlatParameters told apart by walking the nodes."""
    result: dict[str, dict[str, int]] = {}
    for phase in schedule.phases:
        for node in phase.graph.nodes:
            found = node.meta.get("fxshard")
            if found is not None and found.kind in ("all_gather", "reduce_scatter", "all_reduce"):
                key = f"{phase.name} {found.kind}"
                result.setdefault(key, {})
                result[key][found.flat] = result[key].get(found.flat, 0) + 1
    return result


UNITS = ["layers.0", "layers.1", "layers.2"]
ROOT = ["(root).0", "(root).1"]


def once(names: list[str]) -> dict[str, int]:
    return dict.fromkeys(names, 1)


class ManyReads(Framed):
    """Reads one weight ten times and calls one block twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.embed(x))
        for _ in range(10):
            x = x + torch.tanh(x @ self.layers[1].linear.weight)
        x = self.layers[1](x)
        return self.head(self.layers[2](self.layers[2](x)))


@pytest.mark.parametrize("make", [Framed, ManyReads])
@pytest.mark.parametrize(("F", "W"), [(1, 1), (1, 4), (2, 2), (3, 3), (8, 8), (2, 4), (2, 8), (4, 8)])
def test_how_often_each_unit_communicates(make, F, W):
    found = count(fxshard.trace(make(), (X,), F=F, W=W))
    expected = {}
    if F > 1:
        expected["forward all_gather"] = once(UNITS + ROOT)  # the root once a step
        expected["backward all_gather"] = once(UNITS)
        expected["backward reduce_scatter"] = once(UNITS + ROOT)
    if W > F:
        expected["backward all_reduce"] = once(UNITS + ROOT)
    assert found == expected


@pytest.mark.parametrize("make", [Framed, ManyReads])
@pytest.mark.parametrize("F", [1, 2])
def test_what_is_executed_is_what_the_schedule_says(make, F):
    _, model = pair(make, F)
    mean_of_squares(model(X)).backward()
    seen = events(model)
    mean_of_squares(model(X)).backward()
    for phase in model.schedule.phases:
        planned = [(n.meta["fxshard"].kind, n.meta["fxshard"].flat or "") for n in communication(phase)]
        assert [(kind, flat) for name, kind, flat in seen if name == phase.name] == planned


def communication(phase: Phase) -> list:
    kinds = {
        "cast_shard", "all_gather", "wait", "free", "flatten_grads", "reduce_scatter", "all_reduce", "accumulate_grad",
        "throttle", "presence",
    }  # fmt: skip
    return [n for n in phase.graph.nodes if "fxshard" in n.meta and n.meta["fxshard"].kind in kinds]


def test_a_frozen_unit_is_gathered_and_not_reduced():
    model = Framed()
    model.layers[1].requires_grad_(False)
    found = count(fxshard.trace(model, (X,), F=2, W=4))
    assert found["backward all_gather"] == once(UNITS)  # gradients pass through it
    assert found["backward reduce_scatter"] == found["backward all_reduce"] == once(["layers.0", "layers.2", *ROOT])


def test_the_first_unit_is_not_gathered_where_nothing_reads_it():
    """Its weight is only needed for the gradient of its input, and nobody asks for that."""
    found = count(fxshard.trace(Chain(), (X,), F=2))
    assert found["backward all_gather"] == once(["layers.1", "layers.2"])
    found = count(fxshard.trace(Chain(), (X.clone().requires_grad_(),), F=2))
    assert found["backward all_gather"] == once(UNITS)


def test_options_for_what_stays_gathered():
    def gathers(**options) -> dict[str, int]:
        return count(fxshard.trace(Framed(), (X,), F=2, **options)).get("backward all_gather", {})

    assert gathers() == once(UNITS)
    assert gathers(keep_root_resident=False) == once([*UNITS, "(root).1"])  # the embedding is not read in backward
    assert gathers(reshard_after_forward=False) == {}


def test_a_forward_only_schedule_frees_all_it_gathers():
    model = Framed()
    with torch.no_grad():
        schedule = fxshard.trace(model, (X,), F=2)
    assert schedule.backward is None and not schedule.resident
    gathered = [n.meta["fxshard"].flat for n in schedule.forward.all_gathers]
    freed = [n.meta["fxshard"].flat for n in schedule.forward.frees]
    assert sorted(gathered) == sorted(freed) == sorted(UNITS + ROOT)


# -- order


def place(phase: Phase, kind: str, flat: str) -> int:
    (node,) = phase.nodes(kind, flat)
    return list(phase.graph.nodes).index(node)


def computation(phase: Phase, flat: str) -> tuple[int, int]:
    """Places of the first and the last operator that reads a parameter of `flat`."""
    nodes = list(phase.graph.nodes)
    users = [u for n in nodes if "fxshard" in n.meta and n.meta["fxshard"].kind == "param_view"
             and n.meta["fxshard"].flat == flat for u in n.users]  # fmt: skip
    return min(map(nodes.index, users)), max(map(nodes.index, users))


LONG = [f"layers.{i}" for i in range(5)]


def test_backward_gathers_precede_the_reduce_and_the_gradient_before_them():
    backward = fxshard.trace(Framed(5), (X,), F=2).backward
    for i in range(1, 5):
        ahead = place(backward, "all_gather", LONG[i - 1])
        assert ahead < place(backward, "reduce_scatter", LONG[i])
        assert ahead < computation(backward, LONG[i])[0]


def test_without_prefetch_backward_gathers_follow():
    backward = fxshard.trace(Framed(5), (X,), F=2, backward_prefetch=0).backward
    for i in range(1, 5):
        ahead = place(backward, "all_gather", LONG[i - 1])
        assert ahead > place(backward, "reduce_scatter", LONG[i])
        assert ahead > computation(backward, LONG[i])[1]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forward_gathers_precede_the_computation_they_overlap(depth):
    forward = fxshard.trace(Framed(5), (X,), F=2, forward_prefetch=depth, rate_limit=None).forward
    for i in range(5 - depth):
        assert place(forward, "all_gather", LONG[i + depth]) < computation(forward, LONG[i])[0]


def test_without_prefetch_forward_gathers_follow():
    forward = fxshard.trace(Framed(5), (X,), F=2, forward_prefetch=0).forward
    for i in range(4):
        assert place(forward, "all_gather", LONG[i + 1]) > computation(forward, LONG[i])[1]


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
def test_a_deeper_prefetch_is_further_ahead(depth):
    backward = fxshard.trace(Framed(5), (X,), F=2, backward_prefetch=depth, rate_limit=None).backward
    for i in range(depth, 5):
        assert place(backward, "all_gather", LONG[i - depth]) < computation(backward, LONG[i])[0]


def test_each_phase_issues_in_its_own_order_of_use():
    """Prefetching permutes nothing: gathers keep the order of use, reduces that of their gradients."""
    schedule = fxshard.trace(Framed(5), (X,), F=2, backward_prefetch=2, forward_prefetch=2)
    assert [n.meta["fxshard"].flat for n in schedule.forward.all_gathers] == ["(root).0", *LONG, "(root).1"]
    assert [n.meta["fxshard"].flat for n in schedule.backward.all_gathers] == LONG[::-1]
    assert [n.meta["fxshard"].flat for n in schedule.backward.reduce_scatters] == ["(root).1", *LONG[::-1], "(root).0"]


class EncoderDecoder(nn.Module):
    """Backward uses both decoders, then both encoders; the first decoder reads the encoder's output too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))  # registered in the wrong order
        self.encoder = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.start = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.start(x)
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        y = self.start(x)
        for layer in self.decoder:
            y = torch.tanh(layer(y) + memory)
        return y


def test_prefetch_follows_the_true_order_of_use_not_registration():
    schedule = fxshard.trace(EncoderDecoder(), (X,), F=2)
    order = [n.meta["fxshard"].flat for n in schedule.backward.all_gathers if "coder" in n.meta["fxshard"].flat]
    assert order == ["decoder.1", "decoder.0", "encoder.1", "encoder.0"]
    check(EncoderDecoder)


class OneOperatorTwoFlats(nn.Module):
    """Each unit's layer norm reads a frozen weight and a trainable bias at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LayerNorm(8) for _ in range(8))
        for layer in self.layers:
            layer.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_gathers_for_one_operator_have_one_order_on_every_rank():
    """It may not hang on the hash of a name, which differs from process to process."""
    given = (X.clone().requires_grad_(),)
    inserted = fxshard.trace(OneOperatorTwoFlats(), given, F=2, passes=lambda passes: passes[:1])
    ordered = fxshard.trace(OneOperatorTwoFlats(), given, F=2)
    for before, after in zip(inserted.phases, ordered.phases):
        assert [n.name for n in after.all_gathers] == [n.name for n in before.all_gathers]


# -- the rate limit


def most_alive(schedule: Schedule, phase: Phase) -> int:
    """Gathers issued and not freed besides residents, counted on the graph."""
    alive: set[str] = set()
    most = 0
    for node in phase.graph.nodes:
        found = node.meta.get("fxshard")
        if found is None or found.flat in schedule.resident:
            continue
        if found.kind == "all_gather":
            assert found.flat not in alive
            alive.add(found.flat)
        elif found.kind == "free":
            alive.discard(found.flat)
        most = max(most, len(alive))
    assert not alive
    return most


def most_alive_at_run_time(model: nn.Module) -> int:
    seen = events(model)
    mean_of_squares(model(X)).backward()
    alive: set[tuple[str, str]] = set()
    most = 0
    for phase, kind, flat in seen:
        if flat in model.schedule.resident:
            continue
        if kind == "all_gather":
            alive.add((phase, flat))
        elif kind == "free":
            alive.remove((phase, flat))
        most = max(most, len(alive))
    return most


class TwoAtOnce(nn.Module):
    """One operator reads two units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        l0, l1, l2, l3, l4 = self.layers
        return l4(torch.tanh(l3(l2(torch.tanh(l0(x))) * l1.bias)))


def outer(units: int) -> type[nn.Module]:
    class AllAtOnce(TwoAtOnce):
        def forward(self, x: Tensor) -> Tensor:
            biases = torch.stack([layer.bias for layer in self.layers[:units]])
            for layer in self.layers:
                x = layer(x)
            return x * biases.sum(0)

    return AllAtOnce


@pytest.mark.parametrize("prefetch", [1, 2, 4])
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("make", [lambda: Framed(5), Chain], ids=["framed", "chain"])
def test_gathers_alive_never_exceed_the_limit(make, limit, prefetch):
    options = {"rate_limit": limit, "backward_prefetch": prefetch, "forward_prefetch": prefetch}
    schedule = fxshard.trace(make(), (X,), F=2, **options)
    assert max(most_alive(schedule, phase) for phase in schedule.phases) <= limit


def test_a_larger_limit_is_used_when_prefetching_asks_for_it():
    schedule = fxshard.trace(Framed(5), (X,), F=2, rate_limit=4, backward_prefetch=4, forward_prefetch=4)
    assert [most_alive(schedule, phase) for phase in schedule.phases] == [4, 4]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_gathers_alive_at_run_time(limit):
    _, model = pair(lambda: Framed(5), rate_limit=limit, backward_prefetch=4, forward_prefetch=4)
    mean_of_squares(model(X)).backward()
    assert most_alive_at_run_time(model) == max(most_alive(model.schedule, p) for p in model.schedule.phases) == limit


@pytest.mark.parametrize(("units", "limits"), [(2, [2, 3]), (3, [3, 4]), (5, [5])])
def test_the_minimum_width_of_the_schedule_is_the_least_limit(units, limits):
    make = outer(units)
    for limit in limits:
        schedule = fxshard.trace(make(), (X,), F=2, rate_limit=limit)
        assert max(most_alive(schedule, phase) for phase in schedule.phases) <= limit
    with pytest.raises(fxshard.ScheduleError) as caught:
        fxshard.trace(make(), (X,), F=2, rate_limit=units - 1)
    message = str(caught.value)
    assert f"rate_limit={units - 1}" in message and f"at least {units}" in message
    assert sum(f"'layers.{i}'" in message for i in range(5)) >= units


def test_an_operator_that_reads_two_units_needs_two():
    for limit in (2, 3):
        schedule = fxshard.trace(TwoAtOnce(), (X,), F=2, rate_limit=limit)
        assert max(most_alive(schedule, phase) for phase in schedule.phases) <= limit
    # One is enough if the product waits for each in turn: l2's gather is freed before l1's is needed.
    schedule = fxshard.trace(TwoAtOnce(), (X,), F=2, rate_limit=1)
    assert max(most_alive(schedule, phase) for phase in schedule.phases) == 1
    check(TwoAtOnce)


class Nested(TwoAtOnce):
    """The linear operator itself takes its weight from one unit and its bias from another."""

    def forward(self, x: Tensor) -> Tensor:
        l0, l1, l2, l3, l4 = self.layers
        return l4(l3(nn.functional.linear(torch.tanh(l0(x)), l2.weight, l1.bias)))


def test_a_smaller_limit_names_both_units():
    fxshard.trace(Nested(), (X,), F=2, rate_limit=2)
    with pytest.raises(fxshard.ScheduleError, match=r"rate_limit=1") as caught:
        fxshard.trace(Nested(), (X,), F=2, rate_limit=1)
    assert "'layers.1'" in str(caught.value) and "'layers.2'" in str(caught.value)
    check(Nested)


class QuantisedAdapter(nn.Module):
    """Three FlatParameters in one unit, which one operator needs together: trained, frozen bytes, frozen floats."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Parameter(torch.randint(256, (8, 8), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.full((8, 1), 0.01), requires_grad=False)
        self.adapter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.bytes.to(x.dtype) - 128) * self.scale
        return x + nn.functional.linear(x, weight + self.adapter.weight, self.adapter.bias)


@pytest.mark.parametrize("limit", [1, 2])
def test_a_unit_of_several_flat_parameters_counts_once(limit):
    def make() -> nn.Module:
        return nn.Sequential(*(QuantisedAdapter() for _ in range(3)))

    schedule = fxshard.trace(make(), (X,), F=2, rate_limit=limit, forward_prefetch=3, backward_prefetch=3)
    assert len(schedule.flats) == 9
    for phase in schedule.phases:
        alive, most = set(), 0
        for node in phase.graph.nodes:
            found = node.meta.get("fxshard")
            if found is not None and found.kind == "all_gather":
                alive.add(found.flat)
            elif found is not None and found.kind == "free":
                alive.discard(found.flat)
            most = max(most, len({schedule.flats[flat].unit for flat in alive}))
        assert most == limit
    check(make)


@pytest.mark.parametrize("units", [1, 2, 3])
def test_the_same_bound_in_bytes(units):
    unit = 288  # 8 by 8 and 8 in fp32
    schedule = fxshard.trace(
        Framed(5), (X,), F=2, rate_limit=None, rate_limit_bytes=units * unit, backward_prefetch=4, forward_prefetch=4
    )
    assert [most_alive(schedule, phase) for phase in schedule.phases] == [units, units]
    with pytest.raises(fxshard.ScheduleError, match=r"rate_limit_bytes=100 is below.*'\(root\)\.0'"):
        fxshard.trace(Framed(5), (X,), F=2, rate_limit_bytes=100)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_gradient_buffers_waiting_for_their_reduce_are_bounded_too(limit):
    backward = fxshard.trace(Framed(5), (X,), F=2, rate_limit=limit).backward
    waiting, most = 0, 0
    for node in backward.graph.nodes:
        found = node.meta.get("fxshard")
        kind = found.kind if found is not None else ""
        if kind == "flatten_grads":
            waiting += 1
        elif kind == "accumulate_grad":
            waiting -= 1
        most = max(most, waiting)
    assert most == limit and waiting == 0


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_throttles_hold_a_stream_to_the_bound(limit):
    """Gather number k of a phase waits for the free of number k - limit, residents apart."""
    schedule = fxshard.trace(Framed(5), (X,), F=2, rate_limit=limit, forward_prefetch=4, backward_prefetch=4)
    for phase in schedule.phases:
        frees = [n for n in phase.frees if n.meta["fxshard"].flat not in schedule.resident]
        gathers = [n for n in phase.all_gathers if n.meta["fxshard"].flat not in schedule.resident]
        waited = {n.meta["fxshard"].flat: n.args[0] for n in phase.nodes("throttle")}
        for k, gather in enumerate(gathers):
            flat = gather.meta["fxshard"].flat
            if k < limit:
                assert flat not in waited
            else:
                assert waited[flat] is frees[k - limit]
