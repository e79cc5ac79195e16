"""Runs the Python examples of documents one after another in one process, since importing torch takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNNER = """
import contextlib, io, json, sys, traceback

found = []
for code in json.load(sys.stdin):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(code, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc(file=sys.stdout)
    found.append(printed.getvalue())
json.dump(found, sys.stdout)
"""


def printed_by(examples: Sequence[str]) -> list[str]:
    """What each prints, each in a namespace of its own; its traceback where it raises."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(examples),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
