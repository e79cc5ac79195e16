"""What a training script asks of data parallelism, asked of four systems in the same words.

Each feature is a function of a `System`, run on every rank. It returns whether the result is right, or raises: what a system
refuses is not wrong. Right is what one eager process gives that runs each rank's batch in turn.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import fxshard
from tests.peers.systems import CPU, SYSTEMS, System, full, local


class Small(nn.Module):
    """Sizes 5, 7 and 3, an output that a loss may leave out, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 3)
        self.c = nn.Linear(7, 3)

    def forward(self, x: Tensor, both: bool = True) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.a(x))
        return self.b(h), self.c(h)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


def batch(micro: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * micro + rank))


def both(outputs: tuple[Tensor, Tensor]) -> Tensor:
    return outputs[0].square().mean() + outputs[1].square().mean()


def eager(model: nn.Module, micros: int, loss: Callable[[Any], Tensor] = both) -> nn.Module:
    """`.grad` of one process: micro-batches add up, ranks are averaged."""
    W = dist.get_world_size()
    for micro in range(micros):
        for rank in range(W):
            (loss(model(batch(micro, rank))) / W).backward()
    return model


def same(system: System, model: nn.Module, wanted: nn.Module, atol: float = 1e-6) -> bool:
    """Whether the gradients, None included, are those of `wanted`."""
    got = system.gradients(model)
    expected = {n: p.grad for n, p in wanted.named_parameters()}
    if got.keys() != expected.keys():
        return False
    for name, want in expected.items():
        have = got[name]
        if (have is None) != (want is None):
            return False
        if want is not None and not torch.allclose(have, want, rtol=0, atol=atol):  # type: ignore[arg-type]
            return False
    return True


def same_after_a_step(system: System, model: nn.Module, optimizer: torch.optim.Optimizer, wanted: nn.Module) -> bool:
    """Whether SGD on a first batch moves the parameters to where it moves those of `wanted`, which has its gradients."""
    both(model(batch(0))).backward()
    optimizer.step()
    torch.optim.SGD(wanted.parameters(), 0.1).step()
    got = system.values(model)
    return all(torch.allclose(got[n], p, rtol=0, atol=1e-6) for n, p in wanted.named_parameters())


# -- accumulation


def micro_batches_without_communication(system: System) -> bool:
    model = system.wrap(Small())
    with system.no_sync(model):
        for micro in range(2):
            both(model(batch(micro))).backward()
    both(model(batch(2))).backward()
    return same(system, model, eager(Small(), 3))


def no_sync_around_backward_alone(system: System) -> bool:
    """Nothing is reduced, and a last synced backward reduces all."""
    model = system.wrap(Small())
    loss = both(model(batch(0)))
    with system.no_sync(model):
        loss.backward()
    both(model(batch(1))).backward()
    return same(system, model, eager(Small(), 2))


def synced_and_unsynced_in_any_order(system: System) -> bool:
    model = system.wrap(Small())
    for micro, keeps in enumerate((False, True, False, True, True, False)):
        with system.no_sync(model) if keeps else contextlib.nullcontext():
            both(model(batch(micro))).backward()
    return same(system, model, eager(Small(), 6))


def zero_grad_drops_what_was_kept(system: System) -> bool:
    model = system.wrap(Small())
    with system.no_sync(model):
        both(model(batch(7))).backward()
    model.zero_grad()
    both(model(batch(0))).backward()
    return same(system, model, eager(Small(), 1))


def a_step_with_unreduced_gradients_is_refused(system: System) -> bool:
    """Ranks would go apart, or the step would do nothing."""
    model = system.wrap(Small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with system.no_sync(model):
        both(model(batch(0))).backward()
    try:
        optimizer.step()
    except RuntimeError:
        return True
    return False


def accumulation_in_fp32_of_bf16_compute(system: System) -> bool:
    """256 and 1, computed in bf16, make 257 and not 256."""
    model: Any = nn.Linear(1, 1, bias=False)
    if system.name == "fxshard":
        model = fxshard.compile(model, units="none", mixed_precision=fxshard.MixedPrecision(param=torch.bfloat16))
    elif system.name == "FSDP2":
        model = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif system.name == "FSDP1":
        from torch.distributed.fsdp import MixedPrecision

        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = FullyShardedDataParallel(model, mixed_precision=policy, use_orig_params=True, device_id=CPU)
    else:
        model = DistributedDataParallel(model)
    for size in (256.0, 1.0):
        with torch.autocast("cpu", torch.bfloat16, enabled=system.name == "DDP"):
            model(torch.full((1, 1), size)).sum().backward()
    (gradient,) = system.gradients(model).values()
    return gradient is not None and gradient.item() == 257.0


def gradients_summed_over_ranks(system: System) -> bool:
    model = system.summed(Small())
    both(model(batch(0))).backward()
    wanted = Small()
    for rank in range(dist.get_world_size()):
        both(wanted(batch(0, rank))).backward()
    return same(system, model, wanted)


# -- mixed precision


def in_bf16(system: System, model: Any, *full_precision: type[nn.Module]) -> Any:
    """Sharded, every Linear a unit: bf16 parameters, gradients reduced in fp32, modules of these classes in fp32."""
    if system.name == "fxshard":
        precision = fxshard.MixedPrecision(torch.bfloat16, torch.float32, full_precision=full_precision)
        return fxshard.compile(model, units=[nn.Linear], mixed_precision=precision)
    if system.name == "FSDP2":
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wide = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        for module in model.modules():
            if isinstance(module, (nn.Linear, *full_precision)):
                fully_shard(module, mp_policy=wide if isinstance(module, full_precision) else low)
        return fully_shard(model, mp_policy=low)
    if system.name == "FSDP1":
        from torch.distributed.fsdp import MixedPrecision

        more: dict[str, Any] = {"_module_classes_to_ignore": list(full_precision)} if full_precision else {}
        policy = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True, **more)
        wrap = ModuleWrapPolicy({nn.Linear})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=wrap, mixed_precision=policy, use_orig_params=True, device_id=CPU
        )
    raise NotImplementedError("DDP has no dtype to gather parameters in")


class Normed(nn.Module):
    """A norm between two Linears. By hand, with `wide`, it casts what goes into the norm and what comes out."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.a, self.norm, self.b = nn.Linear(5, 7), norm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        h = self.a(x)
        return self.b(self.norm(h.float()).bfloat16() if wide else self.norm(h))


class Widens(nn.Module):
    """It makes fp32 between its Linears. By hand, with `wide`, it casts that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        h = self.a(x).float() + torch.linspace(0, 1, 7)
        return self.b(h.bfloat16() if wide else h)


def as_by_hand_in_bf16(system: System, model: Any, plain: Any) -> bool:
    """Whether gradients are those of Linears converted to bf16 and casts by hand, averaged in fp32."""
    model(batch(0)).float().square().mean().backward()
    W = dist.get_world_size()
    for rank in range(W):
        low = copy.deepcopy(plain)
        low.a.bfloat16(), low.b.bfloat16()
        low(batch(0, rank).bfloat16(), wide=True).float().square().mean().backward()
        for p, q in zip(plain.parameters(), low.parameters()):
            p.grad = q.grad.float() / W + (0.0 if p.grad is None else p.grad)
    return same(system, model, plain)


def norms_in_fp32_beside_bf16(system: System) -> bool:
    model = in_bf16(system, Normed(nn.LayerNorm), nn.LayerNorm)
    return as_by_hand_in_bf16(system, model, Normed(nn.LayerNorm))


def batch_norm_with_fp32_statistics_under_bf16(system: System) -> bool:
    """It is not named."""
    return as_by_hand_in_bf16(system, in_bf16(system, Normed(nn.BatchNorm1d)), Normed(nn.BatchNorm1d))


def fp32_made_between_units_is_cast(system: System) -> bool:
    return as_by_hand_in_bf16(system, in_bf16(system, Widens()), Widens())


# -- clipping and scaling


def stock_clip(system: System, order: float) -> bool:
    model, wanted = system.wrap(Small()), eager(Small(), 1)
    both(model(batch(0))).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order)
    right = nn.utils.clip_grad_norm_(wanted.parameters(), 0.01, order)
    return math.isclose(float(full(total)), float(right), rel_tol=1e-5) and same(system, model, wanted)


def torchs_clip_grad_norm_of_order_2(system: System) -> bool:
    return stock_clip(system, 2.0)


def torchs_clip_grad_norm_of_infinite_order(system: System) -> bool:
    """Some ranks hold nothing of some parameters."""
    return stock_clip(system, math.inf)


def an_infinity_on_one_rank_skips_the_step_on_all(system: System) -> bool:
    model = system.wrap(Small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = system.values(model)
    x = batch(0) * (math.inf if dist.get_rank() == dist.get_world_size() - 1 else 1.0)
    scaler.scale(both(model(x))).backward()
    scaler.step(optimizer)
    scaler.update()
    after = system.values(model)
    return scaler.get_scale() == 4.0 and all(torch.equal(before[n], after[n]) for n in before)


# -- parameters


def an_unused_output_leaves_none(system: System) -> bool:
    """And AdamW, whose weight decay moves what has a gradient of zeros, leaves those parameters alone."""
    system.unused = True
    model = system.wrap(Small())
    system.unused = False
    model(batch(0))[0].square().mean().backward()
    return same(system, model, eager(Small(), 1, lambda outputs: outputs[0].square().mean()))


def frozen_parameters_beside_trainable_ones(system: System) -> bool:
    def made() -> Small:
        model = Small()
        model.a.weight.requires_grad_(False)
        return model

    model = system.wrap(made())
    both(model(batch(0))).backward()
    return same(system, model, eager(made(), 1))


def unfreezing_later(system: System) -> bool:
    frozen = Small()
    frozen.a.requires_grad_(False)
    model = system.wrap(frozen)
    both(model(batch(0))).backward()
    model.zero_grad()
    for p in model.parameters():
        p.requires_grad_(True)
    both(model(batch(0))).backward()
    return same(system, model, eager(Small(), 1))


class Sizes(nn.Module):
    """A parameter without dims, one without elements, and sizes of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.line = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.line(x) * self.scale + self.empty.sum()
        return y, y


def parameters_of_no_dims_and_no_elements(system: System) -> bool:
    model = system.wrap(Sizes())
    both(model(batch(0))).backward()
    return same(system, model, eager(Sizes(), 1))


def a_weight_norm_by_parametrization(system: System) -> bool:
    def made() -> Small:
        model = Small()
        weight_norm(model.a)
        return model

    model = system.wrap(made())
    both(model(batch(0))).backward()
    return same(system, model, eager(made(), 1))


class Tied(nn.Module):
    """Two Linears of one weight, each a unit of its own elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(13)
        self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(torch.tanh(self.a(x)))
        return y, y


def weights_tied_across_units(system: System) -> bool:
    model = system.wrap(Tied())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted = eager(Tied(), 1)
    return same_after_a_step(system, model, optimizer, wanted)


def an_optimizer_made_before_sharding(system: System) -> bool:
    plain = Small()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model, wanted = system.wrap(plain), eager(Small(), 1)
    return same_after_a_step(system, model, optimizer, wanted)


def decay_rules_by_number_of_dims(system: System) -> bool:
    """`p.ndim >= 2` sorts the sharded parameters as it sorts the plain ones."""
    sorted_ = {system.plain(n): p.ndim for n, p in system.wrap(Small()).named_parameters()}
    return sorted_ == {n: p.ndim for n, p in Small().named_parameters()}


def a_fused_optimizer(system: System) -> bool:
    model, wanted = system.wrap(Small()), eager(Small(), 1)
    both(model(batch(0))).backward()
    for m in (model, wanted):
        torch.optim.AdamW(m.parameters(), 0.01, fused=True).step()
    got = system.values(model)
    return all(torch.allclose(got[n], p, rtol=0, atol=1e-6) for n, p in wanted.named_parameters())


def an_optimizer_of_whole_matrices(system: System) -> bool:
    """Muon, which makes an update of a matrix from all of it."""
    model, wanted = system.wrap(Small()), eager(Small(), 1)
    both(model(batch(0))).backward()
    for m, kind in ((model, system.for_matrices(torch.optim.Muon)), (wanted, torch.optim.Muon)):
        kind([p for n, p in m.named_parameters() if n.endswith("weight")], 0.01).step()
    got = system.values(model)
    return all(torch.allclose(got[n], p, rtol=0, atol=1e-6) for n, p in wanted.named_parameters())


def hooks_after_accumulation_see_what_was_reduced(system: System) -> bool:
    model = system.wrap(Small())
    seen: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.detach().clone()}))
    both(model(batch(0))).backward()
    if not same(system, model, eager(Small(), 1)):
        return False
    # FSDP1 may hold nothing of a parameter here
    held = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return seen.keys() == held.keys() and all(torch.equal(local(seen[n]), local(g)) for n, g in held.items())


def hooks_on_a_parameters_gradient(system: System) -> bool:
    """`register_hook` with one that doubles it."""
    model, wanted = system.wrap(Small()), Small()
    for m in (model, wanted):
        for p in m.parameters():
            p.register_hook(lambda gradient: 2 * gradient)
    both(model(batch(0))).backward()
    return same(system, model, eager(wanted, 1))


def hybrid_sharding(system: System) -> bool:
    """Two replicas of two shards each."""
    if system.name == "DDP":
        raise NotImplementedError("DDP does not shard")
    model = system.wrap(Small(), 2)
    both(model(batch(0))).backward()
    return same(system, model, eager(Small(), 1))


# -- calls


def two_forwards_before_their_backwards(system: System) -> bool:
    model = system.wrap(Small())
    losses = [both(model(batch(micro))) for micro in range(2)]
    for loss in losses:
        loss.backward()
    return same(system, model, eager(Small(), 2))


def a_step_between_forward_and_backward_is_refused(system: System) -> bool:
    model = system.wrap(Small())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    both(model(batch(0))).backward()
    loss = both(model(batch(1)))
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError:
        return True
    return False


def evaluation_between_forward_and_backward(system: System) -> bool:
    model = system.wrap(Small())
    loss = both(model(batch(0)))
    with torch.no_grad():
        model(batch(5))
    loss.backward()
    return same(system, model, eager(Small(), 1))


def inference_before_the_first_step(system: System) -> bool:
    model = system.wrap(Small())
    with torch.inference_mode():
        model(batch(5))
    both(model(batch(0))).backward()
    return same(system, model, eager(Small(), 1))


def a_method_beside_forward(system: System) -> bool:
    system.unused = True
    model, encode = system.with_method(Small(), "encode")
    system.unused = False
    encode(batch(0)).square().mean().backward()
    wanted = Small()
    W = dist.get_world_size()
    for rank in range(W):
        (wanted.encode(batch(0, rank)).square().mean() / W).backward()
    return same(system, model, wanted)


def whole_parameters_inside_a_block(system: System) -> bool:
    """As for what works on the plain model."""
    model = system.wrap(Small())
    both(model(batch(0))).backward()
    with system.whole(model):
        got = {system.plain(n): p.detach().clone() for n, p in model.named_parameters()}
    wanted = dict(Small().named_parameters())
    equal = got.keys() == wanted.keys() and all(torch.equal(got[n], p) for n, p in wanted.items())
    return equal and same(system, model, eager(Small(), 1))


def a_double_backward_is_right_or_refused(system: System) -> bool:
    model, wanted = system.wrap(Small()), Small()

    def penalty(m: nn.Module, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(both(m(x.requires_grad_())), x, create_graph=True)
        return slope.square().sum()

    try:
        penalty(model, batch(0)).backward()
    except RuntimeError:
        return True
    W = dist.get_world_size()
    for rank in range(W):
        (penalty(wanted, batch(0, rank)) / W).backward()
    return same(system, model, wanted)


def deepcopying_the_model(system: System) -> bool:
    model = copy.deepcopy(system.wrap(Small()))
    both(model(batch(0))).backward()
    return same(system, model, eager(Small(), 1))


# -- memory


class Checkpointed(Small):
    """A unit around whose call activations are computed again."""

    def forward(self, x: Tensor, both: bool = True) -> tuple[Tensor, Tensor]:
        h = torch.tanh(checkpoint(self.a, x, use_reentrant=False))
        return self.b(h), self.c(h)


def activation_checkpointing(system: System) -> bool:
    model = system.wrap(Checkpointed())
    both(model(batch(0))).backward()
    return same(system, model, eager(Small(), 1))


def shards_in_host_memory(system: System) -> bool:
    model, wanted = system.offloaded(Small()), eager(Small(), 1)
    return same_after_a_step(system, model, torch.optim.SGD(model.parameters(), 0.1), wanted)


class Drawn(nn.Module):
    """Its constructor draws by itself, which `reset_parameters` does not repeat, and has a buffer that no checkpoint holds."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        nn.init.normal_(self.a.weight, std=0.02)
        self.register_buffer("angles", torch.arange(7) / 7, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + self.angles)


def deferred_and_plain(system: System) -> tuple[nn.Module, Drawn]:
    torch.manual_seed(21)
    wanted = Drawn()
    torch.manual_seed(21)
    return system.deferred(Drawn), wanted


def deferred_initialisation_with_the_bits_of_eager(system: System) -> bool:
    model, wanted = deferred_and_plain(system)
    got = system.values(model)
    return all(torch.equal(got[n], p) for n, p in wanted.named_parameters())


def buffers_of_a_deferred_model(system: System) -> bool:
    model, wanted = deferred_and_plain(system)
    return torch.equal(dict(model.named_buffers())["angles"], wanted.angles)


# -- checkpoints


@contextlib.contextmanager
def shared_folder() -> Iterator[str]:
    """One of rank 0's that all ranks see."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        dist.broadcast_object_list(names, 0)
        yield names[0]
        dist.barrier()


def a_sharded_checkpoint_loads_under_another_F(system: System) -> bool:
    """Saved with four shards and loaded into two replicas of two, by `torch.distributed.checkpoint`; both go on alike."""
    if system.name == "DDP":
        raise NotImplementedError("DDP does not shard")
    models = [system.wrap(Small()), system.wrap(Small(), 2)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]

    def states(which: int) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(models[which], optimizers[which])))

    def step(which: int, micro: int) -> None:
        both(models[which](batch(micro))).backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    step(0, 0)
    with shared_folder() as folder:
        dcp.save(states(0), checkpoint_id=folder)
        loaded = states(1)
        dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(models[1], optimizers[1], model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for which in range(2):
        step(which, 1)
    first, second = (system.values(model) for model in models)
    return all(torch.allclose(first[n], second[n], rtol=0, atol=1e-6) for n in first)


def the_full_state_dict_has_plain_names(system: System) -> bool:
    model = system.wrap(Small())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    wanted = Small().state_dict()
    if dist.get_rank():
        return state == {}
    return list(state) == list(wanted) and all(torch.equal(state[n], wanted[n]) for n in wanted)


def state_dict_itself_has_plain_names(system: System) -> bool:
    return list(system.wrap(Small()).state_dict()) == list(Small().state_dict())


def load_state_dict_takes_a_plain_one(system: System) -> bool:
    other = Small()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(1.0)
    model = system.wrap(Small())
    model.load_state_dict(copy.deepcopy(other.state_dict()))
    got = system.values(model)
    return all(torch.equal(got[n], p) for n, p in other.named_parameters())


def optimizer_state_saved_whole_resumes_plainly(system: System) -> bool:
    model, plain = system.wrap(Small()), Small()
    optimizer, wanted = (torch.optim.AdamW(m.parameters(), 0.01) for m in (model, plain))
    both(model(batch(0))).backward()
    optimizer.step()
    eager(plain, 1)
    wanted.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    values = system.values(model)
    if dist.get_rank():
        return state == {}
    resumed = Small()
    resumed.load_state_dict(values)
    other = torch.optim.AdamW(resumed.parameters(), 1.0)
    set_optimizer_state_dict(resumed, other, state, options=StateDictOptions(full_state_dict=True))
    for m, o in ((plain, wanted), (resumed, other)):
        o.zero_grad()
        both(m(batch(1, 0))).backward()
        o.step()
    return all(torch.allclose(p, q, rtol=0, atol=1e-6) for p, q in zip(resumed.parameters(), plain.parameters()))


def pickling_a_state_dict(system: System) -> bool:
    """`torch.save(model.state_dict())` on each rank, and loaded there into such a model of other values."""
    state = system.wrap(Small()).state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = Small()
    nn.init.zeros_(other.a.weight)
    model = system.wrap(other)
    model.load_state_dict(torch.load(file, weights_only=False))
    got = system.values(model)
    return all(torch.equal(got[n], p) for n, p in Small().named_parameters())


FEATURES: dict[str, Callable[[System], bool]] = {
    f.__name__: f
    for f in (
        micro_batches_without_communication,
        no_sync_around_backward_alone,
        synced_and_unsynced_in_any_order,
        zero_grad_drops_what_was_kept,
        a_step_with_unreduced_gradients_is_refused,
        accumulation_in_fp32_of_bf16_compute,
        gradients_summed_over_ranks,
        norms_in_fp32_beside_bf16,
        batch_norm_with_fp32_statistics_under_bf16,
        fp32_made_between_units_is_cast,
        torchs_clip_grad_norm_of_order_2,
        torchs_clip_grad_norm_of_infinite_order,
        an_infinity_on_one_rank_skips_the_step_on_all,
        an_unused_output_leaves_none,
        frozen_parameters_beside_trainable_ones,
        unfreezing_later,
        parameters_of_no_dims_and_no_elements,
        a_weight_norm_by_parametrization,
        weights_tied_across_units,
        an_optimizer_made_before_sharding,
        decay_rules_by_number_of_dims,
        a_fused_optimizer,
        an_optimizer_of_whole_matrices,
        hooks_after_accumulation_see_what_was_reduced,
        hooks_on_a_parameters_gradient,
        hybrid_sharding,
        two_forwards_before_their_backwards,
        a_step_between_forward_and_backward_is_refused,
        evaluation_between_forward_and_backward,
        inference_before_the_first_step,
        a_method_beside_forward,
        whole_parameters_inside_a_block,
        a_double_backward_is_right_or_refused,
        deepcopying_the_model,
        activation_checkpointing,
        shards_in_host_memory,
        deferred_initialisation_with_the_bits_of_eager,
        buffers_of_a_deferred_model,
        the_full_state_dict_has_plain_names,
        state_dict_itself_has_plain_names,
        load_state_dict_takes_a_plain_one,
        a_sharded_checkpoint_loads_under_another_F,
        optimizer_state_saved_whole_resumes_plainly,
        pickling_a_state_dict,
    )
}

REFUSED = {
    "hooks_on_a_parameters_gradient": "its gradient does not pass through autograd",
    "deepcopying_the_model": "can neither be copied nor pickled",
}
"""What fxshard refuses, and words of its errors."""


def ask(system: str, feature: str) -> bool:
    """On one rank."""
    return bool(FEATURES[feature](SYSTEMS[system]))
