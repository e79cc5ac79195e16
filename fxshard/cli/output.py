"""Schedules as text, JSON or pictures, to a file or to stdout."""

from __future__ import annotations

import os
import sys
import tempfile

from fxshard import Schedule, viz
from fxshard.cli.syntax import UsageError


def formats() -> dict[str, str]:
    """Each format's name and the suffix of its files."""
    return {"text": ".txt", "json": ".json", **{_name(suffix): suffix for suffix in viz.FORMATS}}


def _name(suffix: str) -> str:
    """`svg`, `dag.svg`, and `perfetto` of `.perfetto.json`."""
    return suffix.removeprefix(".").removesuffix(".json")


def choose(asked: str | None, path: str | None) -> str:
    """The format: as asked, else by the suffix of `path`, else text. Raises UsageError, also where no file can be made."""
    if path is None:
        return asked or "text"
    check_folder(path)
    fitting = [(suffix, name) for name, suffix in formats().items() if path.lower().endswith(suffix)]
    by_suffix = max(fitting, key=lambda pair: len(pair[0]))[1] if fitting else None
    if asked is None and by_suffix is None:
        raise UsageError(
            f"-o {path}: the suffix says no format; allowed are {', '.join(formats().values())}, or give --format"
        )
    if asked is not None and by_suffix not in (None, asked):
        raise UsageError(f"-o {path}: the suffix says {by_suffix} and --format {asked}; leave out --format")
    return asked or by_suffix or "text"


def check_folder(path: str) -> None:
    """Raise UsageError if no file can be made at `path`: said before a long trace, not after."""
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"-o {path}: there is no folder {os.path.dirname(path)!r}")


def write(schedule: Schedule, form: str, level: str, path: str | None) -> None:
    """Write `schedule` in a format to a file, which is replaced, or to stdout. level: of the text, see `Schedule.text`."""
    if form == "text":
        data = f"{schedule.text(level)}\n".encode()
    elif form == "json":
        data = f"{schedule.to_json().rstrip()}\n".encode()
    else:
        data = _rendered(schedule, formats()[form])
    if path is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:
        with open(path, "wb") as file:
            file.write(data)


def _rendered(schedule: Schedule, suffix: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"schedule{suffix}")
        schedule.render(path)
        with open(path, "rb") as file:
            return file.read()
