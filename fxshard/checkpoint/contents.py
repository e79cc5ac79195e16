"""What the state dict of a sharded model holds, by name and without its values, and how that fits what is to be loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from fxshard.options import listed
from fxshard.parameter import ShardedParameter
from fxshard.runtime.world import together

if TYPE_CHECKING:
    from fxshard.runtime.storage import FlatStorage
    from fxshard.runtime.world import World


@dataclass
class Contents:
    """Names are those of the plain model's state dict; what is tied comes once, with all its names."""

    model: nn.Module
    world: World
    names: list[str]
    """All names, in the order of the state dict."""
    units: list[tuple[FlatStorage, list[list[str]]]]
    """Each FlatParameter with the names of its parameters, none for one that the model does not have any more."""
    buffers: list[tuple[Tensor, list[str]]]
    others: dict[str, Any]
    """What is no tensor, by name (`get_extra_state`)."""

    @staticmethod
    def of(model: nn.Module, what: str) -> Contents:
        """Raises TypeError or ValueError for anything but the module that `fxshard.compile` was given.

        A collective: what the model's own hooks raise on one rank is told on all, as a failure of `what`."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"a model that fxshard.compile returned was expected, not {type(model).__name__}")
        named: dict[str, Any] = dict(model.named_parameters())
        foreign = [f"'{name}'" for name, p in named.items() if not isinstance(p, ShardedParameter) or p.fqn != name]
        if foreign or not named:
            held = f"its parameters {listed(foreign)} are" if foreign else "it has no parameter that is"
            raise ValueError(
                f"this {type(model).__name__} was not sharded by fxshard.compile: {held} not sharded under these names. "
                "Give the module that compile was given, outside of `unsharded()`"
            )
        storages = {p.binding.owner(): None for p in named.values()}
        world = next(iter(storages)).world
        with together(world, what):
            state = model.state_dict(keep_vars=True)
        tied: dict[int, list[str]] = {}
        for name, value in state.items():
            tied.setdefault(id(value), []).append(name)
        units = [(s, [tied.pop(id(p), []) for p in s.parameters.values()]) for s in storages]
        buffers = [(b, tied.pop(id(b))) for b in model.buffers() if id(b) in tied]
        others = {name: state[name] for names in tied.values() for name in names}
        return Contents(model, world, list(state), units, buffers, others)

    def check_extra_states(self) -> None:
        """Raise ValueError for what a state dict of this model holds and nothing could load again."""
        odd = [f"'{name}'" for name in self.others if name.rpartition(".")[2] != "_extra_state"]
        if odd:
            raise ValueError(
                f"the state dict of this {type(self.model).__name__} has {listed(odd)}, neither parameters nor buffers nor "
                "extra state, which could not be loaded again: give it by `get_extra_state`"
            )

    def shapes(self) -> list[tuple[list[str], tuple[int, ...]]]:
        """The names and shape of each tensor, in the order of the state dict."""
        parameters = [(names, spec.shape) for s, tied in self.units for names, spec in zip(tied, s.flat.parameters)]
        found = [*((n, s) for n, s in parameters if n), *((names, tuple(b.shape)) for b, names in self.buffers)]
        place = {name: i for i, name in enumerate(self.names)}
        return sorted(found, key=lambda entry: place[entry[0][0]])

    def compare(
        self, found: Mapping[str, Sequence[int]], source: str, strict: bool, can_relax: bool = True
    ) -> Incompatible:
        """How names and shapes that are to be loaded fit; of tied names one is enough.

        `can_relax`: whether the caller can choose `strict`. Raises ValueError that lists all that is misshapen and, if
        `strict`, all that is missing or unexpected.
        """
        wanted = [*self.shapes(), *(([name], ()) for name in self.others)]
        missing = [names[0] for names, _ in wanted if not any(name in found for name in names)]
        known = {name: shape for names, shape in wanted for name in names}
        unexpected = [name for name in found if name not in known]
        wrong = [
            f"{name} is {tuple(found[name])} there and {shape} here"
            for name, shape in known.items()
            if name in found and tuple(found[name]) != tuple(shape)
        ]
        lines = [f"  misshapen   {line}" for line in wrong]
        if strict:
            lines += [f"  missing     {name}" for name in missing] + [f"  unexpected  {name}" for name in unexpected]
        if lines:
            to_do = "" if wrong or not strict or not can_relax else "\n  to do       strict=False loads what fits"
            text = "\n".join(lines)
            raise ValueError(f"{source} does not fit this {type(self.model).__name__}\n{text}{to_do}")
        return Incompatible(missing, unexpected)


class Incompatible(NamedTuple):
    """What did not fit where `strict=False` let it pass."""

    missing_keys: list[str]
    unexpected_keys: list[str]
