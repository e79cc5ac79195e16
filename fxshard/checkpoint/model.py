"""The state dict of a sharded model: under plain names, as DTensors (whole tensors without a process group).

A piece is cut from a flat buffer and not along a dimension, so a state dict is made, unit by unit: each FlatParameter is
gathered, this rank keeps its rows of each parameter. It holds copies, and making it is a collective of all ranks. Buffers
are rank 0's on every rank, as a checkpoint has one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxshard.parameter import ShardedParameter

if TYPE_CHECKING:
    from fxshard.runtime.storage import FlatStorage


def install(model: nn.Module, storages: Mapping[str, FlatStorage], plain: Callable[[], bool]) -> None:
    """From now on `model.state_dict()` holds DTensors; `load_state_dict` takes them, plain whole tensors and pieces. While
    `plain()`, the parameters are whole ones, and a state dict is what it always was."""
    world = next(iter(storages.values())).world
    model.register_state_dict_post_hook(_hook(storages, plain))
    model.register_load_state_dict_post_hook(lambda module, _: world.buffers_changed(module))


def _hook(storages: Mapping[str, FlatStorage], plain: Callable[[], bool]) -> Callable[..., None]:
    def convert(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        if plain():
            return
        for storage in storages.values():
            specs = storage.flat.parameters
            names = [[prefix + fqn for fqn in (spec.fqn, *spec.aliases)] for spec in specs]
            found = [next((state[n] for n in tied if _is_piece(state.get(n))), None) for tied in names]
            if not any(value is not None for value in found):
                continue
            pieces = [None if value is None else value.local for value in found]
            for tied, whole in zip(names, storage.redistributed(pieces)):
                state.update({n: whole for n in tied if _is_piece(state.get(n))})
        world = next(iter(storages.values())).world
        firsts: dict[int, tuple[str, list[Tensor]]] = {}  # what is one buffer has one name and one value
        for name, buffer in module.named_buffers(remove_duplicate=False):
            first, values = firsts.setdefault(id(buffer), (name, []))
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value is not buffer:  # with `keep_vars` it is
                if not values:
                    values.append(world.first_ranks(first, value))
                state[prefix + name] = values[0]

    return convert


def _is_piece(value: Any) -> bool:
    """Whether it is a piece of a parameter; with `keep_vars` a state dict holds the parameters, and keeps them."""
    return isinstance(value, ShardedParameter) and not isinstance(value, nn.Parameter)
