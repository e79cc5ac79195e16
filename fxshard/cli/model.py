"""`MODULE:FACTORY` and `hf:CONFIG` as a model and the arguments of its forward, both on the meta device."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fxshard.cli import hugging_face
from fxshard.cli.syntax import UsageError, call, first_line, load


def build(target: str, inputs: str | None, sizes: Mapping[str, int]) -> tuple[nn.Module, Any]:
    """The model that `target` names and example inputs for it; nothing is allocated.

    target: MODULE:FACTORY, with arguments in braces if it takes some; `hf:` and a configuration; or the path of a
    `config.json` or of its folder. inputs: MODULE:FUNCTION that returns example inputs. sizes: `batch` and `length`, as far
    as they were asked for. Raises UsageError.
    """
    with torch.device("meta"):
        if target.startswith("hf:") or os.path.basename(target) == "config.json" or os.path.isdir(target):
            named = hugging_face.model(target.removeprefix("hf:"))
            if inputs is None:
                return named, hugging_face.inputs(named, sizes)
            return named, _call(load(inputs), inputs, sizes=sizes)
        name, arguments = call(target)
        factory = load(name)
        made = factory if isinstance(factory, nn.Module) else _call(factory, target, arguments)
        model, own_inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{target} returned {type(model).__name__}; an nn.Module was expected, or (nn.Module, inputs)"
            )
        module, _, attribute = name.partition(":")
        if inputs is None and hasattr(sys.modules[module], f"{attribute}_inputs"):
            inputs = f"{name}_inputs"
        if inputs is not None:
            return model, _call(load(inputs), inputs, sizes=sizes)
    if own_inputs is None:
        raise UsageError(
            f"no example inputs for {name}: define {attribute}_inputs() beside it, give --inputs MODULE:FUNCTION, or let it "
            "return (model, inputs)"
        )
    if sizes:
        raise UsageError(f"{name} makes its inputs itself: leave out {_flags(sizes)}, or give --inputs MODULE:FUNCTION")
    return model, own_inputs


def _call(
    function: Callable[..., Any],
    name: str,
    arguments: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Any:
    """Call what the user named, with `arguments`, and with `sizes` if it takes them. Raises UsageError."""
    if not callable(function):
        raise UsageError(f"{name} is of type {type(function).__name__}; a function was expected")
    sizes = sizes or {}
    unknown = [size for size in sizes if size not in inspect.signature(function).parameters]
    if unknown:
        raise UsageError(f"{name} takes no {' and no '.join(map(repr, unknown))}: leave out {_flags(unknown)}")
    try:
        return function(**(arguments or {}), **sizes)
    except Exception as error:
        raise UsageError(f"calling {name} failed: {first_line(error)} (--debug shows the traceback)") from error


def _flags(sizes: Mapping[str, int] | list[str]) -> str:
    return " and ".join(f"--{size}" for size in sizes)
