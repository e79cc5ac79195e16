"""ShardedParameter: the logical tensor outside, this rank's 1-D piece inside.

Elementwise, foreach and fused operators run on the pieces; norms reduce over the shard group; an operator it does not
know is refused by the parameter's name, so plain code can never compute with a piece while believing it holds the
whole. Gradients and optimizer state are of the same kind.

Shapes: outside `shape` and `stride` of the user's parameter; inside `local` (length,) in storage order, possibly empty.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from fxshard.capture.torch_private import FakeTensor, pytree, unscale, wrapper_subclass, written_arguments

aten = torch.ops.aten

_SAME_PIECE = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.copy_.default,
    }
)
"""Operators without the pointwise tag that act element by element all the same."""

_NORMS = frozenset({aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim})

_REDUCING = ("_foreach_max", "_foreach_powsum")
"""List operators that make one number of a tensor."""

KEEPS_IDENTITY = frozenset({aten.detach.default, aten.alias.default})


class Generation:
    """Counts in-place changes of a model's parameters; a backward refuses parameters changed since its forward."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Binding:
    """What a piece belongs to: the parameter, where the piece starts in it, and who can complete it. `owner()` is the
    `FlatStorage` it lies in.

    `gather(local)` returns the whole parameter, flat in storage order, from the pieces of the shard group (a
    collective); `reduce(values, op)` reduces a small tensor over the group, op "sum" or "max". `cut` says how the parameter
    is cut over the group, see `FlatParameter.cut`.
    """

    __slots__ = ("cut", "fqn", "gather", "generation", "hooks", "length", "numel", "owner", "reduce", "start")

    def __init__(
        self,
        fqn: str,
        numel: int,
        start: int,
        length: int,
        generation: Generation,
        gather: Callable[[Tensor], Tensor],
        reduce: Callable[[Tensor, str], Tensor],
        owner: Callable[[], Any] = lambda: None,
        cut: tuple[int, ...] = (),
    ):
        self.owner, self.cut = owner, cut
        self.fqn, self.numel, self.start, self.length = fqn, numel, start, length
        self.generation, self.gather, self.reduce = generation, gather, reduce
        self.hooks: OrderedDict[int, Callable[[Any], None]] = OrderedDict()
        """Post-accumulate-grad hooks: autograd would also call them where there is no gradient."""


class ShardedParameter(torch.Tensor):
    """A tensor of logical shape whose memory is one rank's 1-D piece.

    Attributes: `local` (length,) the piece; `binding` where it belongs (None while tracing); `is_state` True for
    gradients and optimizer state, whose changes do not count as changes of the parameter.
    """

    local: Tensor
    binding: Binding | None
    fqn: str
    is_state: bool
    edits: list[int]
    """How often it was changed in place, where it is a gradient or state; one list for all aliases."""

    @staticmethod
    def __new__(
        cls: type[ShardedParameter],
        local: Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        fqn: str,
        binding: Binding | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        is_state: bool = False,
        requires_grad: bool = False,
    ) -> ShardedParameter:
        self = wrapper_subclass(cls, shape, stride, dtype or local.dtype, device or local.device, requires_grad)
        self.local, self.binding, self.fqn, self.is_state = local, binding, fqn, is_state
        self.edits = [0]
        return self

    def like(self, local: Tensor, *, state: bool | None = None) -> ShardedParameter:
        """The same place in the same parameter with other memory."""
        return ShardedParameter(
            local,
            self.shape,
            self.stride(),
            self.fqn,
            self.binding,
            dtype=local.dtype if self.dtype == self.local.dtype else self.dtype,
            device=local.device if self.device == self.local.device else self.device,
            is_state=self.is_state if state is None else state,
        )

    def alias(self, local: Tensor) -> ShardedParameter:
        """The same tensor again, of the same memory."""
        made = self.like(local)
        made.edits = self.edits
        return made

    def full_tensor(self) -> Tensor:
        """The whole parameter, shape and stride as outside, on the device of compute. A collective of the shard group: every
        rank must call it."""
        if self.binding is None:
            raise RuntimeError(f"parameter '{self.fqn}' has no group to be gathered from")
        flat = self.binding.gather(self.local.detach())
        return flat.as_strided(self.shape, self.stride())

    def piece_of(self, full: Any) -> Tensor:
        """This rank's piece of a plain tensor, or a DTensor (then a collective), that broadcasts to the logical shape:
        (length,)."""
        if hasattr(full, "full_tensor"):
            full = full.to(full.device_mesh.device_type).full_tensor()  # that of an offloaded shard is in host memory
        binding = self._bound("a plain tensor")
        stored = torch.empty_strided(self.shape, self.stride(), dtype=full.dtype, device=full.device)
        stored.copy_(full)
        flat = stored.as_strided((binding.numel,), (1,))
        return flat[binding.start : binding.start + binding.length]

    def _place(self) -> tuple[Any, ...] | None:
        """What decides, on every rank alike, whether elements of two parameters of one size lie on the same ranks."""
        return None if self.binding is None else (self.binding.cut, self.binding.start, self.binding.length)

    def _bound(self, what: object) -> Binding:
        if self.binding is None:
            _refuse(self, what)
        return self.binding

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["local"], (tuple(self.shape), tuple(self.stride()), self.dtype, self.device, self.fqn)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: tuple[Any, ...], size: Any, stride: Any
    ) -> ShardedParameter:
        shape, strides, dtype, device, fqn = meta
        return ShardedParameter(inner["local"], shape, strides, fqn, dtype=dtype, device=device)

    # torch.distributed.checkpoint asks these of tensors that are in parts. They are imported when asked: it takes a second.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from fxshard.checkpoint import pieces

        return pieces.write_items(fqn, self)

    def __create_chunk_list__(self) -> list[Any]:
        from fxshard.checkpoint import pieces

        return pieces.chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        from fxshard.checkpoint import pieces

        return pieces.shard_at(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = f"{self.local.numel()} of {math.prod(self.shape)} elements held here"
        return f"ShardedParameter('{self.fqn}', shape={tuple(self.shape)}, dtype={self.dtype}, {held})"

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        if self.is_state:
            raise TypeError(
                f"this is a piece of a gradient, or of an optimizer's state, of parameter '{self.fqn}' and cannot be pickled. "
                "`optimizer.state_dict()` holds what can be from the optimizer's first step on; fxshard.checkpoint.save at "
                "any time"
            )
        raise TypeError(
            f"parameter '{self.fqn}' is sharded and cannot be pickled: save `model.state_dict()`, or `parameter.full_tensor()`"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if not self.is_state:
            raise TypeError(
                f"parameter '{self.fqn}' is sharded: a copy would not belong to the compiled model. "
                "Copy the model before fxshard.compile, or take `parameter.full_tensor()`"
            )
        copied = memo[id(self)] = self.like(self.local.clone())
        return copied

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        if isinstance(value, ShardedParameter) and value.dtype == self.dtype and _same_memory(value.local, self.local):
            return
        what = f"{tuple(value.shape)}, {value.dtype}, {value.device}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(
            f"the memory of parameter '{self.fqn}' cannot be replaced (by {what}): it is part of a flat shard. Convert or "
            "move the model before fxshard.compile; to change values use `parameter.copy_(...)` under torch.no_grad()"
        )

    @property
    def _is_param(self) -> bool:
        return self.__dict__.get("is_parameter", False)

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # Module.to, .half and the like make a new Parameter of each converted one: it would not be part of its shard.
        if self.is_state:
            raise self.conversion_error(self)
        self.__dict__["is_parameter"] = value

    def conversion_error(self, converted: Tensor) -> TypeError:
        """What to raise where a module's parameter is to become `converted`."""
        return TypeError(
            f"parameter '{self.fqn}' is sharded and its module cannot be converted any more (to {converted.dtype}, "
            f"{converted.device}): convert or move the model before fxshard.compile"
        )

    def share_memory_(self) -> NoReturn:
        raise TypeError(
            f"parameter '{self.fqn}' is sharded: its piece is a view of a flat shard and cannot be shared alone"
        )

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call `hook(parameter)` after its reduced gradient was set or added to."""
        hooks = self._bound("register_post_accumulate_grad_hook").hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def register_hook(self, hook: Any) -> NoReturn:
        raise TypeError(
            f"parameter '{self.fqn}' is sharded: its gradient does not pass through autograd. "
            "Use register_post_accumulate_grad_hook, which sees the reduced gradient"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        leaves = [x for x in _flat(args, kwargs) if isinstance(x, ShardedParameter)]
        first = leaves[0]
        if isinstance(first.local, FakeTensor) and func not in KEEPS_IDENTITY:
            # Being traced: only shapes matter, and what the model sees is the whole parameter.
            return func(*pytree.tree_map(_full_fake, args), **pytree.tree_map(_full_fake, kwargs))
        if func is aten.view.default and tuple(args[1]) == tuple(first.shape):
            return first.alias(first.local)  # autograd asks for a parameter's accumulator this way
        if func in _NORMS:
            return _norm(func, first, args, kwargs)
        if name == "_foreach_norm":
            return _foreach_norm(args, kwargs)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            return _unscale(leaves, *args)
        if name.startswith(("_foreach", "_fused")):
            return _on_lists(func, name, leaves, args, kwargs)
        if func in _SAME_PIECE or torch.Tag.pointwise in func.tags:
            return _on_pieces(func, name, first, args, kwargs)
        _refuse(first, func)


@functools.cache
def _name(func: Any) -> str:
    """Of an operator: `add_`, whatever its overload."""
    return str(func._schema.name.split("::")[1])


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of an operator, lists taken apart. No list of an operator's holds lists."""
    return [x for a in (*args, *kwargs.values()) for x in (a if isinstance(a, (list, tuple)) else (a,))]


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Of pieces; empty ones have no address, and lie in a storage all the same."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape) for t in (a, b)]
    return places[0] == places[1]


def _full_fake(x: Any) -> Any:
    if not isinstance(x, ShardedParameter):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _refuse(parameter: ShardedParameter, what: object) -> NoReturn:
    raise RuntimeError(
        f"parameter '{parameter.fqn}' is sharded and was used by {what} outside the captured forward. "
        f"Only element-wise operators, optimizers and norms work on a piece; call `.full_tensor()` for the whole, name the "
        "method or submodule in `entry_points` of fxshard.compile, or make an optimizer of whole matrices by `fxshard.gathered`"
    )


def _changed(parameters: Sequence[ShardedParameter]) -> None:
    for p in parameters:
        if p.is_state:
            p.edits[0] += 1
        elif p.binding is not None:
            p.binding.generation.value += 1


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardedParameter]:
    return [x for x in written_arguments(func, args, kwargs) if isinstance(x, ShardedParameter)]


def _check_together(func: Any, first: ShardedParameter, other: ShardedParameter) -> None:
    """Refuse unless element i of one piece belongs to element i of the other."""
    if other.binding is first.binding and other.binding is not None:
        return
    if other.shape != first.shape:
        _refuse(first, f"{func} together with '{other.fqn}' of shape {tuple(other.shape)}")
    if any(n > 1 and a != b for n, a, b in zip(first.shape, first.stride(), other.stride())):
        _refuse(first, f"{func} together with '{other.fqn}' of stride {other.stride()}, not {first.stride()},")
    if other._place() != first._place():
        _refuse(first, f"{func} together with '{other.fqn}', of which another part is held here,")


def _on_pieces(func: Any, name: str, first: ShardedParameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def piece(x: Any) -> Any:
        if isinstance(x, ShardedParameter):
            _check_together(func, first, x)
            return x.local
        if isinstance(x, Tensor) and (x.dim() > 0 or hasattr(x, "full_tensor")):
            return first.piece_of(x)
        return x

    kwargs = dict(kwargs)
    if kwargs.get("memory_format") not in (None, torch.preserve_format):
        kwargs["memory_format"] = torch.preserve_format
    written = _written(func, args, kwargs)
    if isinstance(kwargs.get("out"), Tensor) and not isinstance(kwargs["out"], ShardedParameter):
        _refuse(first, f"{func} into a plain tensor")
    if not written and isinstance(args[0], Tensor) and not isinstance(args[0], ShardedParameter) and name.endswith("_"):
        _refuse(first, f"{func} into a plain tensor")
    out = func(*pytree.tree_map(piece, args), **pytree.tree_map(piece, kwargs))
    if not isinstance(out, Tensor):
        _refuse(first, func)  # one answer about all elements
    if written:
        _changed(written)
        return args[0]
    return first.alias(out) if func in KEEPS_IDENTITY else first.like(out, state=True)


def _on_lists(
    func: Any, name: str, leaves: list[ShardedParameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    plain = [x for x in _flat(args, kwargs) if isinstance(x, Tensor) and not isinstance(x, ShardedParameter)]
    if name in _REDUCING or any(x.numel() != 1 for x in plain):
        _refuse(leaves[0], f"{func}{'' if name in _REDUCING else ' together with plain tensors'}")
    lists = [a for a in args if isinstance(a, (list, tuple)) and len(a) == len(args[0])]
    for column in zip(*lists):
        members = [x for x in column if isinstance(x, ShardedParameter)]
        for other in members[1:]:
            _check_together(func, members[0], other)
    out = func(*map(_local_of_each, args), **{key: _local_of_each(value) for key, value in kwargs.items()})
    _changed(_written(func, args, kwargs))
    if not func._schema.returns:
        return None
    if name.endswith("_"):
        return args[0]
    sources = args[0]
    return [s.like(o, state=True) if isinstance(s, ShardedParameter) else o for s, o in zip(sources, out)]


def _unscale(gradients: list[ShardedParameter], everything: list[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """What `torch.amp.GradScaler` does with gradients of a device and dtype. found_inf becomes 1 on every rank where an
    element on any is not finite, so that all of them skip the step or none does."""
    unscale([_local(g) for g in everything], found_inf, inverse)
    for reduce in dict.fromkeys(g._bound("a gradient scaler").reduce for g in gradients):
        found_inf.copy_(reduce(found_inf.reshape(1), "max").reshape(found_inf.shape))
    _changed(gradients)


def _local(x: Any) -> Any:
    return x.local if isinstance(x, ShardedParameter) else x


def _local_of_each(argument: Any) -> Any:
    return [_local(x) for x in argument] if isinstance(argument, (list, tuple)) else _local(argument)


def _combine(partials: Tensor, order: float, reduce: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Per-tensor norms (n,) of pieces -> norms of the whole. In fp32 or wider: a square may leave fp16's range."""
    wide = partials.to(torch.promote_types(partials.dtype, torch.float32))
    if abs(order) == math.inf:  # a maximum may lose what is no number
        sign, broken = math.copysign(1.0, order), wide.isnan()
        found = reduce(torch.cat([(wide * sign).masked_fill(broken, -math.inf), broken.to(wide.dtype)]), "max")
        total = (found[: len(wide)] * sign).masked_fill(found[len(wide) :] > 0, math.nan)
    elif order == 0:
        total = reduce(wide, "sum")
    else:
        total = reduce(wide.pow(order), "sum").pow(1.0 / order)
    return total.to(partials.dtype)


def _piece_norm(piece: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    if piece.numel() == 0:  # what adds nothing, and is the largest or the smallest of no others
        nothing = math.inf if order < 0 else 0.0
        return torch.full((), nothing, dtype=dtype or piece.dtype, device=piece.device)
    return torch.linalg.vector_norm(piece, order, dtype=dtype)


def _norm(func: Any, first: ShardedParameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    order = args[1] if len(args) > 1 else 2
    order = 2 if order is None else float(order)
    dims = args[2] if len(args) > 2 else kwargs.get("dim")
    if dims not in (None, []) or (len(args) > 3 and args[3]) or kwargs.get("keepdim"):
        _refuse(first, f"{func} along a dimension")
    binding = first._bound(func)
    return _combine(_piece_norm(first.local, order, kwargs.get("dtype")).reshape(1), order, binding.reduce)[0]


def _foreach_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """One reduction for all members of a dtype and a shard group."""
    tensors = args[0]
    order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    sharded = [i for i, t in enumerate(tensors) if isinstance(t, ShardedParameter)]
    result = [
        None if isinstance(t, ShardedParameter) else torch.linalg.vector_norm(t, order, dtype=dtype) for t in tensors
    ]
    groups: dict[Any, list[int]] = {}  # in the order of the list, which is the same on all ranks
    for i in sharded:
        groups.setdefault((tensors[i].dtype, tensors[i]._bound("a norm").reduce), []).append(i)
    for (_, reduce), members in groups.items():
        partials = torch.stack([_piece_norm(tensors[i].local, order, dtype) for i in members])
        for i, value in zip(members, _combine(partials, order, reduce).unbind()):
            result[i] = value
    return result  # type: ignore[return-value]
