"""Shards, gradients and optimizer state in host memory: the same bits as on the device, in a schedule that says so.

On a CPU both memories are the host's, and every copy between them is made all the same.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn

import fxshard
from fxshard.ir.nodes import info
from fxshard.parameter import ShardedParameter
from tests.capture.compare import WIDTH, Block, batches, mean_of_squares

BF16 = fxshard.MixedPrecision(param=torch.bfloat16)
KEEPS = (None, "unsharded", "sharded", None)


class Tied(nn.Module):
    """Blocks, a weight tied across units, a frozen one and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers[3].linear.weight = self.layers[0].linear.weight
        self.layers[1].linear.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def train(F: int, W: int, keeps=(None,) * 3, **options):
    """Losses, norms, parameters and moments of a few steps, a micro-batch for each of `keeps`; and the model."""
    torch.manual_seed(0)
    model = Tied()
    world = fxshard.VirtualWorld(F, contributors=W)
    fxshard.compile(model, world=world, debug=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    found = []
    for step in range(2):
        for keep in keeps:
            for rank, x in enumerate(torch.randn(W, 4, WIDTH, generator=data)):
                with world.rank(rank), model.no_sync(keep) if keep else contextlib.nullcontext():
                    loss = mean_of_squares(model(x))
                    loss.backward()
                    found.append(loss.detach())
        found.append(model.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    found += [p.full_tensor() for p in model.parameters()]
    found += [s["exp_avg_sq"].full_tensor() for s in optimizer.state.values()]
    return found, model


@pytest.mark.parametrize(
    ("F", "W", "keeps", "options"),
    [
        pytest.param(4, 4, KEEPS, {}, marks=pytest.mark.full),
        pytest.param(2, 4, KEEPS, {}, marks=pytest.mark.full),
        (2, 4, KEEPS, {"mixed_precision": BF16}),
        (1, 2, KEEPS, {"mixed_precision": BF16}),
        (1, 1, KEEPS, {}),
        (1, 1, (None,), {"mixed_precision": fxshard.MixedPrecision(reduce=torch.float64)}),
        (2, 2, KEEPS, {"mixed_precision": fxshard.MixedPrecision(torch.bfloat16, full_precision=nn.BatchNorm1d)}),
        (4, 1, (None,), {"rate_limit": None, "reshard_after_forward": False, "mixed_precision": BF16}),
        (4, 1, (None,), {"backward_prefetch": 2, "forward_prefetch": 2, "rate_limit": 3}),
    ],
)
def test_the_same_bits_as_on_the_device(F, W, keeps, options):
    here, _ = train(F, W, keeps, **options)
    there, model = train(F, W, keeps, cpu_offload=True, **options)
    assert model.schedule.forward.nodes("load_shard") and model.schedule.backward.nodes("store_grad")
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_schedule_of_shards_that_are_elsewhere_is_refused():
    torch.manual_seed(0)
    model = fxshard.compile(Tied(), F=1, cpu_offload=True)
    model(batches(1)[0]).sum().backward()
    torch._dynamo.reset()
    other = fxshard.trace(Tied(), (batches(1)[0],), F=1)
    with pytest.raises(ValueError, match=r"1 shards held by a process; .* 1 shards held by a process in host memory"):
        model.schedule = other
    model.schedule = model.schedule.copy()


@functools.cache
def schedule(F: int, W: int, **options):
    torch._dynamo.reset()
    return fxshard.trace(Tied(), (batches(1)[0],), F=F, W=W, cpu_offload=True, **options)


def kinds(nodes) -> list[str]:
    return [info(n).kind for n in nodes]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_load_goes_wherever_its_gather_goes(depth):
    s = schedule(2, 4, forward_prefetch=depth, backward_prefetch=depth, rate_limit=4)
    for phase in s.phases:
        assert phase.all_gathers
        for gather in phase.all_gathers:
            load = gather.args[0]
            assert info(load).kind == "load_shard" and info(load).queue == "unshard"
            assert set(kinds(_between(load, gather))) <= {"throttle"}


def _between(first, last):
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


@pytest.mark.parametrize(("F", "W", "before", "queue"), [
    (4, 4, "reduce_scatter", "reduce"), (2, 4, "all_reduce", "replicate"),
    (1, 4, "all_reduce", "replicate"), (1, 1, "flatten_grads", "reduce"),
])  # fmt: skip
def test_a_store_follows_the_last_collective_of_its_gradient_on_its_queue(F, W, before, queue):
    stores = schedule(F, W).backward.nodes("store_grad")
    assert len(stores) == 6
    for store in stores:
        assert info(store.args[0]).kind == before and store.prev is store.args[0] and info(store).queue == queue
        (wait,) = store.users
        assert kinds(wait.users) == ["accumulate_grad"]


def test_the_rate_limit_bounds_the_hosts_arena():
    sizes = {limit: schedule(4, 4, rate_limit=limit).memory.host_bytes for limit in (1, 2, None)}
    s = schedule(4, 4)
    shards = [-(-f.shard_numel * f.dtype.itemsize // 16) * 16 for f in s.flats.values() if f.requires_grad]
    assert sizes[1] == max(shards)
    assert sizes[1] < sizes[2] < sizes[None] == sum(shards)


def test_without_offload_there_is_nothing_of_it():
    torch._dynamo.reset()
    s = fxshard.trace(Tied(), (batches(1)[0],), F=2, W=4)
    assert s.memory.host_bytes == 0
    assert not any(p.nodes(kind) for p in s.phases for kind in ("load_shard", "store_grad"))


def test_a_schedule_of_offloaded_shards_survives_json_and_is_not_another_models():
    s = schedule(2, 4)
    again = fxshard.Schedule.from_json(s.to_json())
    assert again.offloaded and again.text() == s.text() and again.memory == s.memory
    assert "cpu" not in s.text() and "LOAD" in s.text() and "arena on the host" in s.text()


def test_what_stands_for_a_parameter_is_on_the_device_it_is_computed_on():
    device = torch.device("meta")
    parameter = ShardedParameter(torch.zeros(6), (4, 3), (3, 1), "w", device=device)
    names, context = parameter.__tensor_flatten__()
    again = ShardedParameter.__tensor_unflatten__({n: getattr(parameter, n) for n in names}, context, None, None)
    for each in (parameter, again, parameter.like(torch.zeros(6)), parameter.alias(parameter.local)):
        assert each.device == device and each.local.device == torch.device("cpu")
    seen = []

    def backend(module, inputs):
        seen.append([x.device for x in inputs if isinstance(x, torch.Tensor)])
        return lambda *args: (torch.zeros(2, 4, device=device),)

    linear = nn.Linear(3, 4, bias=False, device=device)
    linear.weight = nn.Parameter(parameter)
    torch.compile(linear, backend=backend)(torch.zeros(2, 3, device=device))
    assert seen == [[device, device]]
