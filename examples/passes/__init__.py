"""Passes worth having that are not in the default pipeline, each with a page in docs/passes."""

from __future__ import annotations

from collections.abc import Callable

from fxshard.passes import Pass


def after(name: str, *extra: Pass) -> Callable[[list[Pass]], list[Pass]]:
    """For `passes=` of compile and trace: the default pipeline with `extra` right after the pass of this name.

    The function raises ValueError, naming the passes there are, if these options have no such pass.
    """

    def place(default: list[Pass]) -> list[Pass]:
        names = [p.name for p in default]
        if name not in names:
            raise ValueError(f"there is no pass '{name}' to stand after; there are {', '.join(names)}")
        position = names.index(name) + 1
        return [*default[:position], *extra, *default[position:]]

    return place
