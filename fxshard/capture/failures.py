"""Capture errors in the user's words: what in forward could not be captured, with file and line."""

from __future__ import annotations

import re
import sysconfig
from typing import Any

from torch import nn

from fxshard.capture.torch_private import FailOnRecompileLimitHit, recompile_limit
from fxshard.errors import CaptureError, FxshardError


def capture_error(error: BaseException, model: nn.Module | None, sharded: bool) -> Exception:
    """The error to raise for a failed capture: our own if one of ours caused it, else a CaptureError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, FxshardError):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    name = type(model).__name__ if model is not None else "the model"
    if isinstance(error, FailOnRecompileLimitHit):
        return CaptureError(
            f"forward of {name} was captured {recompile_limit()} times and asks for one more: an attribute, a mode, a Python "
            "value or the number of dimensions of an input is new at each call. Torch's warning ('last reason') says which.\n"
            "  to do   keep it the same, pass it as a tensor, or raise torch._dynamo.config.recompile_limit"
        )
    plainly = (
        "call it in `with model.unsharded():` (the model stays sharded)"
        if sharded
        else "call the model without fxshard"
    )
    text = str(error)
    where = _where(error, text)
    reason = _reason(text)
    return CaptureError(
        f"forward of {name} could not be captured whole: {reason}\n"
        f"  where   {where}\n"
        f"  to do   {plainly}: what fails there too is a fault of the call. Otherwise move this out of forward, "
        "or compile with fullgraph=False"
    )


def _where(error: Any, text: str) -> str:
    """`file:line in function` of the innermost frame of the user's code."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', text)
    if not frames and getattr(error, "real_stack", None):
        frames = [(f.filename, str(f.lineno), f.name) for f in error.real_stack]
    library = sysconfig.get_paths()["stdlib"]
    installed = sysconfig.get_paths()["purelib"]
    inside = [f for f in frames if "/torch/" not in f[0] and not f[0].startswith("<fxshard")]
    own = [f for f in inside if f[0].startswith(installed) or not f[0].startswith(library)]
    file, line, function = (own or frames or [("unknown", "0", "forward")])[-1]
    return f"{file}:{line} in {function}"


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else "unknown reason"
    detail = next((line for line in lines if line.startswith(("Explanation:", "Developer debug context:"))), "")
    return f"{first}. {detail}".rstrip(". ")
