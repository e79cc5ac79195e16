"""From the words of a command line to a schedule: a file of one, or a model that is traced."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fxshard
import fxshard.passes
from fxshard.cli.model import build
from fxshard.cli.syntax import UsageError, assignment, call, first_line, load
from fxshard.ir.json_form import schedule_from_document
from fxshard.passes import Pass
from fxshard.passes.manager import is_reproducer, rerun

TARGET = """MODULE:FACTORY (a function that returns an nn.Module, or that and example inputs); hf:CONFIG{option=value}, \
hf:NAME or the path of a config.json (transformers); or FILE.json, a saved schedule"""


@dataclass(frozen=True)
class Settings:
    """How a model is traced: what the flags say."""

    F: int | None = None
    W: int | None = None
    inputs: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    @staticmethod
    def of(parsed: argparse.Namespace) -> Settings:
        asked = {"batch": parsed.batch, "length": parsed.length}
        sizes = {name: size for name, size in asked.items() if size is not None}
        return Settings(parsed.F, parsed.world, parsed.inputs, sizes, tuple(parsed.set), tuple(parsed.passes))

    def and_of(self, parsed: argparse.Namespace, side: str) -> Settings:
        """With the options of side 'a' or 'b' after these."""
        own, passes = getattr(parsed, f"{side}_set"), getattr(parsed, f"{side}_passes")
        return replace(self, assignments=(*self.assignments, *own), passes=(*self.passes, *passes))

    def given(self) -> list[str]:
        """The flags that were given."""
        flags = {
            "--F": self.F,
            "--world": self.W,
            "--inputs": self.inputs,
            "--set": self.assignments,
            "--pass": self.passes,
        }
        return [*(flag for flag, given in flags.items() if given), *(f"--{size}" for size in self.sizes)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how a model is traced."""
    group = parser.add_argument_group("how a model is traced")
    group.add_argument("--F", type=int, metavar="F", help="ranks that share one copy of the parameters")
    group.add_argument("--world", type=int, metavar="W", help="ranks in all (default: F)")
    group.add_argument(
        "--inputs",
        metavar="MODULE:FUNCTION",
        help="returns the arguments of forward: a tuple, list or dict, or the only one (default: FACTORY_inputs)",
    )
    group.add_argument("--batch", type=_positive, metavar="N", help="batch of the inputs, if their function takes it")
    group.add_argument("--length", type=_positive, metavar="N", help="length of the inputs, if their function takes it")
    add_options(group)


def add_options(parser: Any, side: str = "") -> None:
    """`--set` and `--pass`, or `--a-set` and `--a-pass` for side 'a'."""
    flag, of = (f"--{side}-", f" of {side.upper()} alone") if side else ("--", "")
    name = f"{side}_" if side else ""
    parser.add_argument(
        f"{flag}set", dest=f"{name}set", metavar="OPTION=VALUE", action="append", default=[],
        help=f"an option of fxshard.compile{of}",
    )  # fmt: skip
    parser.add_argument(
        f"{flag}pass", dest=f"{name}passes", metavar="NAME{OPTION=VALUE}", action="append", default=[],
        help=f"a pass{of}: in place of the default one of its name, else before plan-memory; MODULE:CLASS for your own",
    )  # fmt: skip


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def is_saved(target: str) -> bool:
    """Whether `target` is the file of a schedule. A `config.json` is of a model, and so is what has `hf:` before it."""
    return target.endswith(".json") and os.path.basename(target) != "config.json" and not target.startswith("hf:")


def schedule_of(target: str, settings: Settings) -> fxshard.Schedule:
    """The schedule in a file, or of a step of a model. Raises UsageError, ScheduleError where a rule is broken."""
    if is_saved(target):
        return _saved(target, settings)
    options = _options(settings)
    if settings.F is None:
        raise UsageError(f"--F is missing: how many ranks share one copy of the parameters of {target}")
    model, inputs = build(target, settings.inputs, settings.sizes)
    return fxshard.trace(model, inputs, settings.F, settings.W, **options)


def _saved(path: str, settings: Settings) -> fxshard.Schedule:
    if flags := settings.given():
        raise UsageError(f"{path} is a saved schedule, which is not traced again: leave out {', '.join(flags)}")
    if not os.path.isfile(path):
        raise UsageError(f"there is no file {path!r}")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        document = json.loads(text)
        return rerun(document) if is_reproducer(document) else schedule_from_document(document)
    except fxshard.FxshardError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{path!r} holds no schedule as `fxshard show -o {path}` writes it: {first_line(error)}"
        ) from error


def _options(settings: Settings) -> dict[str, Any]:
    """Keyword arguments of `fxshard.trace`."""
    options: dict[str, Any] = {}
    precision: dict[str, Any] = {}
    for text in settings.assignments:
        name, value = assignment(text)
        whole, dot, part = name.partition(".")
        if not dot:
            options[name] = _object(value) if isinstance(value, str) else value
        elif whole == "mixed_precision":
            precision[part] = _object(value) if part == "full_precision" and isinstance(value, str) else _dtype(value)
        else:
            raise UsageError(f"{text!r}: {whole!r} has no parts; only mixed_precision has")
    if precision:
        allowed = [f.name for f in dataclasses.fields(fxshard.MixedPrecision)]
        if unknown := [part for part in precision if part not in allowed]:
            raise UsageError(f"mixed_precision has no {unknown[0]!r}: allowed are {', '.join(allowed)}")
        options["mixed_precision"] = fxshard.MixedPrecision(**precision)
    if settings.passes:
        if "passes" in options:
            raise UsageError("passes are given by --set passes=... or by --pass, not by both")
        options["passes"] = _placed([fxshard.passes.parse(text) for text in settings.passes])
    return options


def _dtype(value: Any) -> Any:
    """`bfloat16` and `torch.bfloat16` are the dtype; anything else is itself."""
    found = getattr(torch, str(value).removeprefix("torch."), value)
    return found if isinstance(found, torch.dtype) else value


def _object(word: str) -> Any:
    """What `MODULE:NAME` names, called if it has braces; any other word is itself."""
    name, arguments = call(word) if ":" in word else (word, None)
    if ":" not in name:
        return word
    found = load(name)
    return found if arguments is None else found(**arguments)


def _placed(given: Sequence[Pass]) -> Callable[[list[Pass]], list[Pass]]:
    """A pipeline in which each pass stands for the default one of its name, or else before the last, plan-memory."""

    def pipeline(default: list[Pass]) -> list[Pass]:
        passes = list(default)
        for p in given:
            place = next((i for i, d in enumerate(default) if d.name == p.name), None)
            if place is None:
                passes.insert(len(passes) - 1, p)
            else:
                passes[place] = p
        return passes

    return pipeline
