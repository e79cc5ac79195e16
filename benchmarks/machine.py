"""What a result was measured on: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch

import fxshard


def describe() -> dict[str, Any]:
    """JSON-able: processor or GPU, cores, Python, torch, Triton and fxshard versions, and the commit ('' outside git)."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "gpu": gpu,
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version,
        "fxshard": fxshard.__version__,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit() -> str:
    try:
        answer = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()
