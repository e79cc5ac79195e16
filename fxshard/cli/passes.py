"""list the passes in pipeline order, with what they require, provide and can be told"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys

from fxshard.cli.syntax import UsageError, call, close, load
from fxshard.options import Options
from fxshard.passes import BY_NAME, Pass, default_passes

EPILOG = """\
examples:
  fxshard passes
  fxshard passes rate-limit
  fxshard passes my_passes:LateFrees
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="one pass, with all it says of itself; MODULE:CLASS for your own"
    )


def run(parsed: argparse.Namespace) -> int:
    if parsed.name is None:
        print("\n\n".join(map(_entry, BY_NAME.values())))
        print(f"\nby default: {', '.join(p.name for p in default_passes(Options()))}")
        return 0
    name, _ = call(parsed.name)
    found = load(name) if ":" in name else BY_NAME.get(name)
    if found is None:
        hint = close(name, BY_NAME)
        raise UsageError(f"there is no pass {name!r}{hint} (there are {', '.join(BY_NAME)}; MODULE:CLASS for your own)")
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise UsageError(f"{name} is not a class of passes: derive it from fxshard.passes.Pass")
    print(f"{_entry(found, summary=False)}\n\n{_documentation(found)}")
    return 0


def _entry(p: type[Pass], summary: bool = True) -> str:
    """A pass and its contract, in a few lines."""
    options = [f"{f.name}: {f.type} = {_default(f)}" for f in dataclasses.fields(p)]
    rows = {"requires": p.requires, "provides": p.provides, "options": options}
    lines = [p.name, *([f"  {_documentation(p).splitlines()[0]}"] if summary else [])]
    return "\n".join([*lines, *(f"  {title:<8}  {', '.join(words) or '-'}" for title, words in rows.items())])


def _default(option: dataclasses.Field[object]) -> str:
    if option.default is not dataclasses.MISSING:
        return repr(option.default)
    return "..." if option.default_factory is dataclasses.MISSING else repr(option.default_factory())


def _documentation(p: type[Pass]) -> str:
    """The docstring of the pass's file, as one file holds one pass; a pass of the user's may have its own instead."""
    own = p.__dict__.get("__doc__") or ""
    written = own if not own.startswith(f"{p.__name__}(") else ""  # dataclass makes one up
    module = sys.modules[p.__module__].__doc__ or ""
    first, second = (module, written) if p.__module__.startswith("fxshard.") else (written, module)
    return inspect.cleandoc(first or second or "(it says nothing of itself)")
