"""What is written on the command line: `name=value`, `NAME{a=1, b=word}` and `MODULE:NAME`."""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import os
import re
from collections.abc import Iterable
from typing import Any, NoReturn


class UsageError(Exception):
    """What was asked for cannot be done; one line that says what to write instead."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError, takes no abbreviations and keeps the lines of its epilog."""

    def __init__(self, **settings: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def value(text: str) -> Any:
    """A Python literal; a word that is none stays text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def assignment(text: str) -> tuple[str, Any]:
    """`rate_limit=1` -> ('rate_limit', 1). A name may have a dot. Raises UsageError."""
    name, equals, given = text.partition("=")
    if not equals or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{text!r}: NAME=VALUE was expected, such as rate_limit=1")
    return name, value(given)


def call(text: str) -> tuple[str, dict[str, Any] | None]:
    """`NAME{a=1, b=word}` -> ('NAME', {'a': 1, 'b': 'word'}); `NAME` -> ('NAME', None). Raises UsageError."""
    match = re.fullmatch(r"([^{}]+)(?:\{(.*)\})?", text.strip(), re.DOTALL)
    if match is None:
        raise UsageError(f"{text!r}: NAME or NAME{{option=value, ...}} was expected")
    name, options = match.groups()
    return name, None if options is None else _keywords(text, options)


def _keywords(whole: str, options: str) -> dict[str, Any]:
    try:
        tree = ast.parse(f"f({options})", mode="eval").body
    except SyntaxError as error:
        raise UsageError(f"{whole!r}: {error.msg} between the braces; write {{option=value, ...}}") from None
    if not isinstance(tree, ast.Call) or tree.args or any(k.arg is None for k in tree.keywords):
        raise UsageError(f"{whole!r}: {{option=value, ...}} was expected between the braces")
    return {k.arg: value(ast.unparse(k.value)) for k in tree.keywords if k.arg is not None}


def load(text: str) -> Any:
    """Import what `MODULE:NAME` names; NAME may have dots. Raises UsageError."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"{text!r}: MODULE:NAME was expected, such as examples.models:gpt_demo")
    if module.endswith(".py") or os.sep in module:
        dotted = os.path.normpath(module).removesuffix(".py").replace(os.sep, ".")
        raise UsageError(f"{text!r}: a module was expected, not a file; from its folder write {dotted}:{name}")
    found = _import(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"module {module!r} has no {name!r}{close(part, dir(found))}")
        found = getattr(found, part)
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"there is no module {error.name!r}: it has to be installed, or to lie in the current directory "
                f"({os.getcwd()}) or on PYTHONPATH"
            ) from None
        raise UsageError(f"importing {module!r} failed: {first_line(error)}") from error
    except Exception as error:
        raise UsageError(f"importing {module!r} failed: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """`ValueError: what happened`, of a message of many lines the first."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def close(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'this'?`, or nothing."""
    found = difflib.get_close_matches(word, [name for name in allowed if not name.startswith("_")], n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
