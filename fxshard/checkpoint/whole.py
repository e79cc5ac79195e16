"""Whole plain state dicts on rank 0, streamed: one unit at a time goes from the shards to rank 0, or from there to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxshard.checkpoint.contents import Contents, Incompatible
from fxshard.runtime.world import agree, together

if TYPE_CHECKING:
    from fxshard.runtime.storage import FlatStorage


def stream_state_dict(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, whole plain tensor on the CPU) for each entry of the plain model's state dict, on rank 0; nothing elsewhere.

    Entries come unit by unit, then buffers, then what modules give as extra state, as it is; tied names one after another
    with the same tensor. Rank 0 holds one unit beside its shards and what it was given, other ranks nothing. A collective
    that goes on as it is iterated: every rank runs the loop to its end, though its body is entered on rank 0 only. Raises
    ValueError for a model that is not sharded, TypeError for what is no module.
    """
    return streamed(Contents.of(model, "stream_state_dict"))


def streamed(contents: Contents) -> Iterator[tuple[str, Any]]:
    for storage, tied in contents.units:
        yield from _unit(storage, tied)  # its buffer is gone before the next one is gathered
    for buffer, names in contents.buffers:
        value = contents.world.first_ranks(names[0], buffer)
        if contents.world.is_first:
            yield from ((name, value.cpu()) for name in names)
    if contents.world.is_first:
        yield from contents.others.items()


def _unit(storage: FlatStorage, tied: list[list[str]]) -> Iterator[tuple[str, Tensor]]:
    full = storage.world.gather_to_first(storage.flat, storage.shard)
    if full is not None:
        for whole, names in zip(storage.flat.wholes(full), tied):
            copied = whole.to("cpu", copy=True)
            yield from ((name, copied) for name in names)


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The plain model's whole state dict, on the CPU, on rank 0; {} on other ranks. A collective; see `stream_state_dict`."""
    contents = Contents.of(model, "full_state_dict")
    found = dict(streamed(contents))
    return {name: found[name] for name in contents.names if name in found}


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any] | None, strict: bool = True) -> Incompatible:
    """Load a plain model's whole state dict that rank 0 has; other ranks give None.

    Goes unit by unit: rank 0 holds one beside the state dict and its shards, other ranks a second shard of one. Values are
    cast to the dtypes here; of tied names one is enough, and the first counts. A collective. Returns what is missing and
    unexpected; raises with nothing loaded where that is anything and `strict`, or shapes differ: TypeError or ValueError on
    rank 0, RuntimeError on the others.
    """
    contents = Contents.of(model, "load_full_state_dict")
    world = contents.world
    agree(world, "load_full_state_dict", strict=strict)
    given: Mapping[str, Any] = {}
    result = Incompatible([], [])
    with together(world, "load_full_state_dict"):
        contents.check_extra_states()
        if world.is_first:
            given, result = _checked(contents, state, strict)
    present, result = world.gather_objects((set(given), result))[0]
    for storage, tied in contents.units:
        _load_unit(storage, [next((n for n in names if n in present), None) for names in tied], given)
    for buffer, names in contents.buffers:
        if name := next((n for n in names if n in present), None):
            with together(world, "load_full_state_dict"):
                if world.is_first:
                    buffer.copy_(given[name].detach())
            world.broadcast_from_first(buffer)
    world.buffers_changed(model)
    others = {name: given.get(name) for name in contents.others if name in present}
    told = world.gather_objects(others)[0]
    with together(world, "load_full_state_dict"):
        for name, value in told.items():
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
    return result


def _checked(contents: Contents, state: Any, strict: bool) -> tuple[Mapping[str, Any], Incompatible]:
    if not isinstance(state, Mapping):
        raise TypeError(f"a state dict was expected on rank 0, not {type(state).__name__}")
    tensors = {name for names, _ in contents.shapes() for name in names}
    odd = [f"'{n}' is a {type(v).__name__}" for n, v in state.items() if n in tensors and not _is_plain(v)]
    if odd:
        raise TypeError(
            f"load_full_state_dict takes plain tensors with values, which rank 0 alone has: {', '.join(odd)}"
        )
    shapes = {name: value.shape if isinstance(value, Tensor) else () for name, value in state.items()}
    shapes.update(dict.fromkeys(contents.others.keys() & state.keys(), ()))
    return state, contents.compare(shapes, "the state dict", strict)


def _is_plain(value: Any) -> bool:
    plain = type(value) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and value.device.type != "meta" and value.layout is torch.strided and not value.is_quantized


def _load_unit(storage: FlatStorage, names: list[str | None], given: Mapping[str, Any]) -> None:
    """Scatter rank 0's values of the parameters that have a name; the others stay what they are."""
    if not any(names):
        return
    flat, world = storage.flat, storage.world
    full = torch.zeros(flat.padded_numel if world.is_first else 0, dtype=flat.dtype, device=world.device)
    with together(world, "load_full_state_dict"):
        if world.is_first:
            for whole, name in zip(flat.wholes(full), names):
                if name is not None:
                    whole.copy_(given[name].detach())
    part = world.scatter_from_first(flat, full)
    for index, (piece, name) in enumerate(zip(storage.views(part), names)):
        if name is not None:
            storage.set_piece(index, piece)
