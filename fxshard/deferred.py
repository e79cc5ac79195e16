"""Deferred initialisation: a constructor runs without memory, what it does is recorded, and replayed when asked for.

[Note: same bits]
Inside `deferred_init` operators make fake tensors, which have a device and no memory, and each operator that makes or writes
one is recorded. Random ones are also run at once, into memory that is given back, so that the generator goes the way it goes
in an eager constructor; its state before each is kept. Replaying a tensor runs the operators it depends on, in their order,
each random one from its own state: the bits are the eager constructor's, whatever is replayed, in whatever order.

A record belongs to a storage: views and `nn.Parameter` share it, `tensor.data = other` takes the other's. What needs values
(`tensor.item()`) replays what it needs. Real tensors (files, `torch.from_numpy`) stay real. Fake tensors remember their mode,
so what is done to the model after `deferred_init` is recorded as well. They are not on the meta device: torch's own
`init.trunc_normal_` does nothing there.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxshard.capture.torch_private import (
    NEEDS_VALUES,
    FakeTensor,
    FakeTensorMode,
    default_generator,
    forget_fakes,
    negative_view,
    pytree,
    written_arguments,
)
from fxshard.ir.layout import is_dense

aten = torch.ops.aten

_OVERWRITES = frozenset(
    {
        "fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_",
        "geometric_",
    }
)  # fmt: skip
"""In-place operators that do not read what they write to."""

_EMPTY = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"})

_REBINDS = frozenset({"set_"})
"""A tensor takes another storage, and its record with it."""

_FRESH = frozenset({"lift_fresh", "lift_fresh_copy"})
"""What `torch.tensor(numbers)` ends with."""

_NUMBERS = itertools.count()

M = TypeVar("M", bound=nn.Module)


def deferred_init(constructor: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """`constructor(*args, **kwargs)`, a model whose parameters and buffers have no memory yet and know how to become real.

    `fxshard.compile` then initialises it unit by unit, without `init=`, and gives the bits of `constructor(*args, **kwargs)`
    with the same seed, on the device it was made for; the generators end where the eager constructor leaves them. Takes the
    time of its random operators and, for a moment, the memory of the largest of them. Raises TypeError unless a module is made.
    """
    recorder = _Recorder()
    with recorder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # `copy.deepcopy` does
        model = constructor(*args, **kwargs)
    recorder.scratch.clear()
    if not isinstance(model, nn.Module):
        raise TypeError(f"deferred_init: {constructor!r} returned {type(model).__name__}, not an nn.Module")
    return model


def is_deferred(tensor: Tensor) -> bool:
    """Whether it has no memory and can be replayed. What was asked for on the meta device cannot."""
    return _record(tensor) is not None and tensor.device.type != "meta"


def has_no_memory(tensor: Tensor) -> bool:
    """Whether it is on the meta device, or can be replayed."""
    return tensor.device.type == "meta" or is_deferred(tensor)


def replay(tensor: Tensor, place: Tensor | None = None) -> Tensor:
    """The real values of a recorded tensor: a new tensor, on the device that the constructor asked for.

    place: a dense tensor of the same shape, stride, dtype; the values are made in it, without memory of their own where the
    constructor made them in place.
    """
    record = _record(tensor)
    assert record is not None, "not recorded"
    if place is None:
        return replay_together([tensor])[0]
    ref = _Ref.to(tensor, record)
    fits = place.nbytes == record.num_bytes and place.stride() == tensor.stride() and place.device == record.device
    memory = {record: _bytes_of(place)} if fits else {}
    made = _run([ref], memory)[0]
    if made.data_ptr() != place.data_ptr():
        place.copy_(made)
    return place


def replay_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The real values of recorded tensors; what shared memory shares it again."""
    return _run([_Ref.to(t, record) for t in tensors if (record := _record(t)) is not None], {})


class _Record:
    """What is known of one storage without memory."""

    __slots__ = ("device", "num_bytes", "writes")

    def __init__(self, num_bytes: int, device: torch.device):
        self.num_bytes, self.device = num_bytes, device
        self.writes: list[_Operation] = []
        """All operations that wrote to it, the one that made it first."""


def _record(tensor: Tensor) -> _Record | None:
    if not isinstance(tensor, FakeTensor) or not isinstance(tensor.fake_mode, _Recorder):
        return None
    return tensor.untyped_storage().__dict__.get("_fxshard_record")


@dataclass(frozen=True)
class _Ref:
    """A tensor in a recorded storage."""

    record: _Record
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False
    """Views that conjugate or negate when they are read."""

    @staticmethod
    def to(tensor: Tensor, record: _Record) -> _Ref:
        place = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return _Ref(record, tensor.dtype, *place, tensor.is_conj(), tensor.is_neg())

    def covers(self) -> bool:
        """Whether it is all of its storage."""
        numel = torch.Size(self.size).numel()
        return numel * self.dtype.itemsize == self.record.num_bytes and is_dense(self.size, self.stride)

    def within(self, memory: Tensor) -> Tensor:
        """The same tensor in real memory (bytes,)."""
        typed = memory.view(self.dtype)
        view = typed.as_strided(self.size, self.stride, typed.storage_offset() + self.offset)
        view = view.conj() if self.conjugate else view
        return negative_view(view) if self.negative else view


@dataclass(frozen=True)
class _Real:
    """A real tensor that an operation reads. It is not copied, and must not have changed when it is read again; of memory that
    torch does not own (numpy's) nobody would know."""

    given: Tensor
    version: int
    tensor: Tensor
    """Of the same memory; `given.data = other` leaves it what it was."""

    @staticmethod
    def of(given: Tensor) -> _Real:
        kept = given.detach() if given.untyped_storage().resizable() else given.detach().clone()
        return _Real(given, given._version, kept)

    def checked(self) -> Tensor:
        if self.given._version != self.version:
            raise RuntimeError(
                f"deferred_init: a real tensor of shape {tuple(self.tensor.shape)} that the constructor read was changed in "
                "place afterwards; give the constructor a clone"
            )
        return self.tensor


@dataclass(eq=False)
class _Operation:
    """An operator with references in place of tensors, in the order of the constructor."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[_Ref | None]
    made: set[_Record]
    """Storages that it made."""
    random: tuple[torch.Generator, Tensor] | None
    """The generator it draws from and that one's state before."""
    number: int = field(default_factory=lambda: next(_NUMBERS))
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    @functools.cached_property
    def reads(self) -> list[_Record]:
        refs = [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, _Ref)]
        return [r.record for r in (refs[1:] if _name(self.func) in _OVERWRITES else refs)]

    def replaces(self, record: _Record) -> bool:
        """Whether nothing of what was in the storage before is left, nor went into what is there now."""
        if record in self.made:
            return True
        target = self.args[0] if self.args else None
        if _name(self.func) not in _OVERWRITES or not isinstance(target, _Ref):
            return False
        return target.record is record and target.covers() and record not in self.reads


class _Recorder(FakeTensorMode):
    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.computing = False
        """Whether it is working out what an operator makes, by way of other operators."""
        self.scratch: dict[torch.device, Tensor] = {}
        """Memory (bytes,) that random operators write to, one for all: small allocations in between, and freed large ones are
        cut up and never fit again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recorder:
        return self  # tensors copied refer to it

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        kwargs = dict(kwargs)
        if self.computing:
            return super().__torch_dispatch__(func, types, args, kwargs)
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fakes = [record for record in map(_record, given) if record is not None]
        makes_tensors = any("Tensor" in str(r.type) for r in func._schema.returns)
        if _name(func) in _FRESH and not fakes:
            return self._copy_of(given[0])
        if not fakes and (given or not makes_tensors):
            return func(*args, **kwargs)
        written = [x for x in written_arguments(func, args, kwargs) if isinstance(x, Tensor)]
        if any(_record(x) is None for x in written):
            if any(_record(x) is not None for x in written):
                raise RuntimeError(f"deferred_init: {func} writes to real tensors and to what the constructor made")
            return func(*pytree.tree_map(_evaluated, args), **pytree.tree_map(_evaluated, kwargs))
        then_args, then_kwargs = pytree.tree_map(_referred, (tuple(args), kwargs))  # before it changes its arguments
        sizes = [x.untyped_storage().nbytes() for x in written]
        self.computing = True
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except NEEDS_VALUES as error:  # how large the result is, for one
            if written:
                raise RuntimeError(
                    f"deferred_init: {func}, which writes in place, cannot be recorded: {error}"
                ) from error
            return func(*pytree.tree_map(_evaluated, args), **pytree.tree_map(_evaluated, kwargs))
        finally:
            self.computing = False
            forget_fakes(self)
        if _name(func) in _REBINDS:
            return out
        if sizes != [x.untyped_storage().nbytes() for x in written]:
            raise RuntimeError(f"deferred_init: {func} resizes a tensor in place, which cannot be replayed")
        made: set[_Record] = set()
        results = [_adopt(x, made) for x in pytree.tree_leaves(out)]
        touched = [*made, *(record for record in map(_record, written) if record is not None)]
        if touched:
            random = self._draw(func, args, kwargs, touched[0].device)
            operation = _Operation(func, then_args, then_kwargs, results, made, random)
            for record in dict.fromkeys(touched):
                record.writes.append(operation)
        return out

    def _copy_of(self, numbers: Tensor) -> Tensor:
        """What `torch.tensor(numbers)` is: fresh at each replay."""
        out = self.from_tensor(numbers)
        made: set[_Record] = set()
        operation = _Operation(aten.clone.default, (_referred(numbers),), {}, [_adopt(out, made)], made, None)
        for record in made:
            record.writes.append(operation)
        return out

    def _draw(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> tuple[torch.Generator, Tensor] | None:
        """Run a random operator for what it does to its generator; returns that and its state before. None for any other."""
        if torch.Tag.nondeterministic_seeded not in func.tags or device.type == "meta":
            return None
        generator = kwargs.get("generator") or default_generator(device)
        state = generator.get_state()
        real = list(pytree.tree_map(_evaluated, args[1:]))
        if args:
            overwrites = _name(func) in _OVERWRITES
            real.insert(0, self._scratch(args[0], device) if overwrites else pytree.tree_map(_evaluated, args[0]))
        func(*real, **pytree.tree_map(_evaluated, kwargs))
        return generator, state

    def _scratch(self, target: Tensor, device: torch.device) -> Tensor:
        numel = 1 + sum((n - 1) * step for n, step in zip(target.shape, target.stride())) if target.numel() else 0
        memory = self.scratch.get(device)
        if memory is None or memory.numel() < numel * target.dtype.itemsize:
            self.scratch.pop(device, None)
            memory = torch.empty(numel * target.dtype.itemsize, dtype=torch.uint8, device=device)
            self.scratch[device] = memory
        usable = memory[: memory.numel() // target.dtype.itemsize * target.dtype.itemsize]
        return usable.view(target.dtype).as_strided(target.size(), target.stride())


def _adopt(result: Any, made: set[_Record]) -> _Ref | None:
    if not isinstance(result, Tensor):
        return None
    record = _record(result)
    if record is None:
        storage = result.untyped_storage()
        record = storage.__dict__["_fxshard_record"] = _Record(storage.nbytes(), result.device)
        made.add(record)
    return _Ref.to(result, record)


def _evaluated(x: Any) -> Any:
    return replay(x) if isinstance(x, Tensor) and is_deferred(x) else x


def _referred(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    record = _record(x)
    return _Real.of(x) if record is None else _Ref.to(x, record)


def _needed(records: Iterable[_Record]) -> list[_Operation]:
    """The operations that the values in these storages depend on, in order."""
    found: dict[int, _Operation] = {}
    todo: list[tuple[_Record, float]] = [(record, float("inf")) for record in records]
    seen = set(todo)
    while todo:
        record, before = todo.pop()
        end = bisect.bisect_left(record.writes, before, key=lambda operation: operation.number)
        for operation in reversed(record.writes[:end]):
            found[operation.number] = operation
            for read in operation.reads:
                if read is not record and (read, operation.number) not in seen:
                    seen.add((read, operation.number))
                    todo.append((read, operation.number))
            if operation.replaces(record):
                break
    return [found[number] for number in sorted(found)]


@torch.no_grad()
def _run(wanted: Sequence[_Ref], places: Mapping[_Record, Tensor]) -> list[Tensor]:
    """Replay. `places` are bytes (num_bytes,) in which the values of a storage are to be."""
    memory = dict(places)

    def of(record: _Record) -> Tensor:
        if record not in memory:
            memory[record] = torch.empty(record.num_bytes, dtype=torch.uint8, device=record.device)
        return memory[record]

    def real(x: Any) -> Any:
        if isinstance(x, _Ref):
            return x.within(of(x.record))
        return x.checked() if isinstance(x, _Real) else x

    operations = _needed(ref.record for ref in wanted)
    last = {record: op for op in operations for record in (*op.reads, *(r.record for r in op.results if r))}
    kept = {ref.record for ref in wanted}
    for operation in operations:
        if _name(operation.func) not in _EMPTY:
            with _as_then(operation):
                out = operation.func(*pytree.tree_map(real, operation.args), **pytree.tree_map(real, operation.kwargs))
            for ref, result in zip(operation.results, pytree.tree_leaves(out)):
                if ref is not None and ref.record in operation.made:
                    _keep(ref, result, memory)
        for record in [r for r in memory if last.get(r) is operation and r not in kept]:
            del memory[record]
    return [ref.within(of(ref.record)) for ref in wanted]


@contextlib.contextmanager
def _as_then(operation: _Operation) -> Iterator[None]:
    """The generator's state, the default dtype and no autocast, as when the operation was recorded (below autocast)."""
    dtype = torch.get_default_dtype()
    now = None if operation.random is None else operation.random[0].get_state()
    try:
        torch.set_default_dtype(operation.default_dtype)
        if operation.random is not None:
            operation.random[0].set_state(operation.random[1])
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if operation.random is not None and now is not None:
            operation.random[0].set_state(now)


def _keep(ref: _Ref, result: Tensor, memory: dict[_Record, Tensor]) -> None:
    """Make what an operation made the contents of its storage."""
    record = ref.record
    same = (tuple(result.stride()), result.storage_offset()) == (ref.stride, ref.offset)
    if record not in memory and same and result.untyped_storage().nbytes() == record.num_bytes:
        memory[record] = torch.empty(0, dtype=torch.uint8, device=result.device).set_(result.untyped_storage())
        return
    if record not in memory:
        memory[record] = torch.empty(record.num_bytes, dtype=torch.uint8, device=record.device)
    ref.within(memory[record]).copy_(result)


def _bytes_of(dense: Tensor) -> Tensor:
    """The memory of a dense tensor, (bytes,)."""
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _name(func: Any) -> str:
    return func._schema.name.split("::")[1]
