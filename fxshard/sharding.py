"""From plain parameters to pieces: each rank takes its part of every unit, and the parameter objects become its pieces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxshard import deferred
from fxshard.capture import torch_private
from fxshard.ir import FlatParameter
from fxshard.options import FLOATS, InitFunction, Options
from fxshard.parameter import Generation
from fxshard.runtime import FlatStorage, World
from fxshard.runtime.world import together


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
    here = world.is_first or not options.sync_parameters
    with _Sources(model, world.device, init, here) as sources:
        for flat in flats.values():
            with together(world, "initialising the model"):
                full = sources.whole(flat, owners)
            if options.sync_parameters:
                part = world.scatter_from_first(flat, full)
            else:
                assert full is not None
                part = world.my_part(flat, full)
            own = part.clone() if part.untyped_storage().nbytes() > part.numel() * part.element_size() else part
            if options.cpu_offload and own.is_cuda:
                own = own.cpu().pin_memory()
            storages[flat.name] = FlatStorage(flat, world, own, generation)
            del full
        with together(world, "initialising the model"):
            sources.buffers()
            sources.attributes()
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


def cast_buffers(
    model: nn.Module, dtype: torch.dtype | None, full_precision: Iterable[nn.Module]
) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Put floating buffers into `dtype` (None leaves them), those of modules in full precision excepted.

    One that several modules share stays one. Returns what was replaced, and where it was.
    """
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    if dtype is None:
        return replaced
    kept = {buffer for module in full_precision for buffer in module.buffers()}
    cast: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in FLOATS and buffer not in kept:
                replaced.append((module._buffers, name, buffer))
                module._buffers[name] = cast.setdefault(buffer, buffer.to(dtype))
    return replaced


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


class _Sources:
    """Where the values of parameters and buffers come from: they are there, or are replayed, or a module's init makes them.

    What an init is to make is put on the device, a module at a time, and its parameters back on meta once they were taken.
    One meta tensor becomes one real one, wherever it is tied. On an exception everything is as it was, buffers included.
    `here`: whether this process's values count; where they do not, replaying is left out.
    """

    def __init__(self, model: nn.Module, device: torch.device, init: InitFunction | None, here: bool):
        self.model, self.device, self.here = model, device, here
        self.replays = init is None
        self.init = init or default_init(model)
        self.saved: list[tuple[dict[str, Any], str, Any]] = []
        self.seen: set[nn.Module] = set()
        self.real: dict[Tensor, Tensor] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None:
            for table, name, tensor in self.saved:
                table[name] = tensor

    def _replayed(self, tensor: Tensor | None) -> bool:
        return self.replays and tensor is not None and deferred.is_deferred(tensor)

    def runs_init(self, owner: tuple[nn.Module, str]) -> bool:
        """Whether the parameter there is made by an init."""
        tensor = owner[0]._parameters[owner[1]]
        return tensor is not None and self._is_empty(tensor)

    def _is_empty(self, tensor: Tensor) -> bool:
        """Whether an init is to make it."""
        return deferred.has_no_memory(tensor) and not self._replayed(tensor)

    def whole(self, flat: FlatParameter, owners: Mapping[str, tuple[nn.Module, str]]) -> Tensor | None:
        """A flat buffer (padded,) with all parameters in it; None where this process's values do not count."""
        if not self.here and not any(self.runs_init(owners[fqn]) for fqn in flat.fqns):
            return None
        full = torch.zeros(flat.padded_numel, dtype=flat.dtype, device=self.device)
        for spec, offset in zip(flat.parameters, flat.offsets):
            place = full[offset : offset + spec.numel].as_strided(spec.shape, spec.stride)
            self.write([owners[fqn] for fqn in (spec.fqn, *spec.aliases)], place)
        return full

    def write(self, owners: Sequence[tuple[nn.Module, str]], place: Tensor) -> None:
        """Put the values of the parameter that is at all these owners into `place`, a dense tensor of its shape and stride."""
        module, name = owners[0]
        tensor = module._parameters[name]
        assert tensor is not None
        if self._replayed(tensor):
            if self.here:
                deferred.replay(tensor.detach(), place)
            return
        # Where another module that it is tied to was made already, so was it.
        if self._is_empty(tensor) and tensor not in self.real:
            self.real[tensor] = nn.Parameter(place, tensor.requires_grad)
        for owner, _ in owners:
            self._make(owner)
        made = module._parameters[name]
        assert made is not None
        if made.data_ptr() != place.data_ptr():
            place.copy_(made.detach())
        for table, name, original in self.saved:
            if table.get(name) is made:
                table[name] = original
                self.real.pop(original, None)

    def buffers(self) -> None:
        """All buffers, and modules that have nothing else. Those that shared memory share it again."""
        places = [(m._buffers, n, b) for m in self.model.modules() for n, b in m._buffers.items() if self._replayed(b)]
        for table, name, buffer in places:
            self.saved.append((table, name, buffer))
        buffers = list(dict.fromkeys(buffer for _, _, buffer in places if buffer is not None))
        self.real |= zip(buffers, (real.to(self.device) for real in deferred.replay_together(buffers)))
        for table, name, buffer in places:
            table[name] = self.real[buffer]  # type: ignore[index]
        for module in self.model.modules():
            self._make(module)

    def attributes(self) -> None:
        """What modules hold beside parameters and buffers; those are found again where they are attributes too."""
        parameters = set(self.model.parameters())

        def real(x: Any) -> Any:
            if not isinstance(x, Tensor) or not deferred.is_deferred(x) or x in parameters:
                return x
            if x not in self.real:
                self.real[x] = deferred.replay(x)
            return self.real[x]

        for module in self.model.modules():
            for name, value in list(vars(module).items()):
                if name not in ("_parameters", "_buffers", "_modules"):
                    leaves, structure = torch_private.pytree.tree_flatten(value)
                    made = [real(leaf) for leaf in leaves]
                    if any(a is not b for a, b in zip(leaves, made)):
                        self.saved.append((vars(module), name, value))
                        vars(module)[name] = torch_private.pytree.tree_unflatten(made, structure)

    def _empty_like(self, tensor: Tensor) -> Tensor:
        # `torch.empty_like` of a tensor without memory may be another one.
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self.device)

    def _make(self, module: nn.Module) -> None:
        if module in self.seen:
            return
        self.seen.add(module)
        places = [
            (table, name, tensor)
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None and self._is_empty(tensor)
        ]
        for table, name, tensor in places:
            self.saved.append((table, name, tensor))
            if tensor not in self.real:
                real = self._empty_like(tensor)
                self.real[tensor] = nn.Parameter(real, tensor.requires_grad) if table is module._parameters else real
            table[name] = self.real[tensor]  # type: ignore[assignment]
        if places:
            self.init(module)


def default_init(model: nn.Module) -> InitFunction:
    """What initialises a module that is on the meta device without a record: its own `reset_parameters`, then the
    `_init_weights(module)` of the nearest module around it that has one, as models of transformers do."""
    around = _enclosing(model)

    def init(module: nn.Module) -> None:
        for function in _own_init(module):
            function()
        if (outer := around.get(module)) is not None:
            outer._init_weights(module)  # type: ignore[operator]

    return init


def uninitialisable(model: nn.Module) -> list[str]:
    """Names of parameters and buffers on the meta device that neither a record nor `default_init` makes."""
    around = _enclosing(model)
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if not _own_init(module) and module not in around
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.device.type == "meta"
    ]


def _own_init(module: nn.Module) -> list[Callable[[], Any]]:
    named = [getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters")]
    return [function for function in named if callable(function)][:1]


def _enclosing(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module the nearest one at or above it that has `_init_weights`."""
    found: dict[nn.Module, nn.Module] = {}

    def walk(module: nn.Module, outer: nn.Module | None) -> None:
        outer = module if callable(getattr(module, "_init_weights", None)) else outer
        if outer is not None:
            found.setdefault(module, outer)
        for child in module.children():
            walk(child, outer)

    walk(model, None)
    return found
