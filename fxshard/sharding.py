"""From plain parameters to pieces: each rank takes its part of every unit, and the parameter objects become its pieces."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.capture import torch_private
from fxshard.ir import FlatParameter
from fxshard.options import InitFunction, Options
from fxshard.parameter import Generation
from fxshard.runtime import FlatStorage, World


def shard(
    model: nn.Module,
    flats: Mapping[str, FlatParameter],
    world: World,
    options: Options,
    init: InitFunction | None,
    generation: Generation,
) -> dict[str, FlatStorage]:
    """Take this rank's part of every unit, one unit at a time, then turn the module's parameters into pieces.

    Nothing of the module changes before every part is there. Parameters keep their identity: an optimizer made before
    goes on holding the module's parameters. Buffers start as rank 0's. A collective.
    """
    storages: dict[str, FlatStorage] = {}
    owners = {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._parameters
    }
    with _Materialised(world.device, init) as materialised:
        for flat in flats.values():
            full = torch.zeros(flat.padded_numel, dtype=flat.dtype, device=world.device)
            for spec, offset in zip(flat.parameters, flat.offsets):
                with materialised.parameter([owners[fqn] for fqn in (spec.fqn, *spec.aliases)]) as source:
                    full[offset : offset + spec.numel].as_strided(spec.shape, spec.stride).copy_(source.detach())
            part = world.scatter_from_first(flat, full) if options.sync_parameters else world.my_part(flat, full)
            own = part.clone() if part.untyped_storage().nbytes() > part.numel() * part.element_size() else part
            storages[flat.name] = FlatStorage(flat, world, own, generation)
            del full
        materialised.buffers(model)
    replaced = []
    for storage in storages.values():
        for spec in storage.flat.parameters:
            piece = storage.parameters[spec.fqn]
            module, name = owners[spec.fqn]
            original = module._parameters[name]
            assert original is not None
            if _become(original, piece):
                storage.parameters[spec.fqn] = original
            else:
                replaced.append(spec.fqn)
                for fqn in (spec.fqn, *spec.aliases):
                    owner, own_name = owners[fqn]
                    owner._parameters[own_name] = piece
    if replaced:
        warnings.warn(
            f"{len(replaced)} parameters ('{replaced[0]}', ...) are weakly referenced elsewhere (a torch.compile of "
            "this model?) and were replaced by new objects: an optimizer made before does not hold them",
            stacklevel=3,
        )
    for buffer in model.buffers():
        if options.sync_parameters:
            world.broadcast_from_first(buffer)
    return storages


def cast_buffers(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Put floating buffers into `dtype` (None leaves them); one that several modules share stays one."""
    if dtype is None:
        return
    cast: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = cast.setdefault(buffer, buffer.to(dtype))


def _become(original: nn.Parameter, piece: nn.Parameter) -> bool:
    """Turn `original` into `piece`, keeping the object and what the user put on it; False if weakly referenced."""
    for key, value in original.__dict__.items():
        piece.__dict__.setdefault(key, value)
    _, hooks = torch_private.gradient_hooks(original)
    for hook in hooks.values():
        piece.register_post_accumulate_grad_hook(hook)
    hooks.clear()
    try:
        torch.utils.swap_tensors(original, piece)
    except RuntimeError:
        return False
    return True


class _Materialised:
    """Modules on the meta device made real one at a time; each parameter is put back on meta once it was taken.

    One meta tensor becomes one real one, wherever it is tied. On an exception everything is as it was, buffers included.
    """

    def __init__(self, device: torch.device, init: InitFunction | None):
        self.device, self.init = device, init
        self.saved: list[tuple[dict[str, Any], str, Any]] = []
        self.seen: set[nn.Module] = set()
        self.real: dict[Tensor, Tensor] = {}

    def __enter__(self) -> _Materialised:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            for table, name, tensor in self.saved:
                table[name] = tensor

    @contextlib.contextmanager
    def parameter(self, places: Sequence[tuple[nn.Module, str]]) -> Iterator[Tensor]:
        """The real parameter that is at all these places, for as long as the block takes."""
        for module, _ in places:
            self._make(module)
        module, name = places[0]
        tensor = module._parameters[name]
        assert tensor is not None
        yield tensor
        for table, name, original in self.saved:
            if table.get(name) is tensor:
                table[name] = original
                self.real.pop(original, None)

    def buffers(self, model: nn.Module) -> None:
        """Modules that have only buffers."""
        for module in model.modules():
            self._make(module)

    def _make(self, module: nn.Module) -> None:
        if module in self.seen:
            return
        self.seen.add(module)
        places = [
            (table, name, tensor)
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None and tensor.device.type == "meta"
        ]
        if not places:
            return
        assert self.init is not None
        for table, name, tensor in places:
            self.saved.append((table, name, tensor))
            if tensor not in self.real:
                real = torch.empty_like(tensor, device=self.device)
                self.real[tensor] = nn.Parameter(real, tensor.requires_grad) if table is module._parameters else real
            table[name] = self.real[tensor]  # type: ignore[assignment]
        self.init(module)
