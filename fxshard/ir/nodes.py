"""What a node of a phase is to the schedule, and what can be asked of one node alone."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxshard.ir import ops

INFO = "fxshard"
"""Key of a node's `NodeInfo` in `node.meta`."""


@dataclass
class NodeInfo:
    """What a node is to the schedule.

    `kind` is one of `ops.NODE_KINDS`. Of a bucket (an AllGather of several FlatParameters, or the throttle before it)
    `members` are their names, `flat` is these joined (`a + b`, no FlatParameter's name) and `unit` the first one's.
    """

    kind: str
    flat: str | None = None
    unit: str | None = None
    queue: str = "compute"
    fqn: str | None = None
    by: str = "capture"
    """The pass that put the node there."""
    moved_by: tuple[str, ...] = ()
    """The passes that moved it, in order."""
    num_bytes: int = 0
    members: tuple[str, ...] = ()

    @property
    def flats(self) -> tuple[str, ...]:
        """The FlatParameters the node is about: a bucket's members, `(flat,)` for any other node of one, else ()."""
        return self.members or ((self.flat,) if self.flat is not None else ())

    @property
    def label(self) -> str:
        """`flat` for text that is read: of more than two members the first and how many more."""
        more = len(self.members) - 1
        return f"{self.members[0]} + {more} more" if more > 1 else self.flat or ""


@dataclass(frozen=True)
class Slot:
    """A place in the arena: `num_bytes` from `offset`. `after` names the nodes whose end frees the bytes for this
    use."""

    offset: int
    num_bytes: int
    after: tuple[str, ...] = ()


def info(node: fx.Node) -> NodeInfo:
    """The node's info; a plain operator of the model is `compute`."""
    found = node.meta.get(INFO)
    return found if found is not None else _COMPUTE


_COMPUTE = NodeInfo("compute")


def identifier(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


_CASTS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "precision.py")
"""Traced with the user's code, and none of it."""


def user_line(node: fx.Node) -> str:
    """`model.py:41` of the user's code that made the node, or ''."""
    if (line := node.meta.get("line")) is not None:
        return line
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.stack_trace or "")
    frames = [f for f in frames if f[0][0] != "<" and f[0] != _CASTS]  # code made at run time has no file
    found = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{os.path.basename(found[-1][0])}:{found[-1][1]}" if found else ""


def describe(node: fx.Node) -> str:
    """The node as a user knows it: `AG layers.1`, or the operator and the line it comes from, `mm.default (model.py:41)`."""
    found = info(node)
    if found.kind in ops.LABELS:
        return f"{ops.LABELS[found.kind]} {found.label}".strip()
    if found.kind == "param_view":
        return f"view of '{found.fqn}'"
    if node.op == "call_function":
        line = user_line(node)
        return f"{getattr(node.target, '__name__', node.target)}{f' ({line})' if line else ''}"
    return node.name


def takes_kept(node: fx.Node) -> bool:
    """Whether a FLAT or an AR adds what earlier backwards kept."""
    position = {"flatten_grads": 5, "all_reduce": 2}.get(info(node).kind, len(node.args))
    return len(node.args) > position and bool(node.args[position])


def bytes_text(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or suffix == "GiB":
            return f"{num_bytes:.0f} {suffix}" if num_bytes == int(num_bytes) else f"{num_bytes:.1f} {suffix}"
        num_bytes /= 1024
    raise AssertionError


def tensor_bytes(node: fx.Node) -> int:
    """Bytes of the node's fake value, symbolic sizes by their hints."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(map(hint, value.shape)) * value.dtype.itemsize


def hint(size: int | torch.SymInt) -> int:
    """A size as it was when captured; asking a symbolic size itself would fix it for good."""
    return size if isinstance(size, int) else int(size.node.hint)


def flatten_nodes(tree: Any) -> Iterator[fx.Node]:
    """Every node in a tree of arguments."""
    if isinstance(tree, fx.Node):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from flatten_nodes(value)
    elif isinstance(tree, (list, tuple, Sequence, Iterable)) and not isinstance(tree, (str, torch.Tensor)):
        for value in tree:
            yield from flatten_nodes(value)
