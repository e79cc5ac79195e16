"""What compiling costs, by depth: capture, passes, verifier, lowering, for GPTs of the width of the 175-billion-parameter one.

    python -m benchmarks.compile_time [LAYERS ...] [--json FILE]      12 24 48 96 192 unless told

Each depth is traced once on the meta device, F = W = 128, in a process of its own; `growth` is the exponent from
24 layers on, 1 where the time is linear in them. Verify is all of the verifier, which runs after each pass; lower is the
writing of both phases' code, without buffers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fxshard
import fxshard.passes as passes
from benchmarks.machine import describe
from examples.models import GPT, GPT_175B
from fxshard.ir.nodes import info
from fxshard.passes import manager
from fxshard.runtime.lowering import lower

DEPTHS = (12, 24, 48, 96, 192)
PARTS = ("capture", "passes", "verify", "lower")


class Timed:
    """A function in a module, and the seconds that calls of it take from now on."""

    def __init__(self, module: Any, name: str):
        self.function, self.seconds = getattr(module, name), 0.0
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return self.function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started


def measure(layers: int) -> dict[str, Any]:
    config = dataclasses.replace(GPT_175B, layers=layers)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.length, dtype=torch.int64)
    running, verifying = Timed(passes, "run"), Timed(manager, "verify")
    started = time.perf_counter()
    schedule = fxshard.trace(model, {"tokens": tokens, "targets": tokens}, F=128, W=128)
    traced = time.perf_counter() - started
    started = time.perf_counter()
    for phase in schedule.phases:
        lower(phase, torch.nn.Module(), {n: None for n in phase.graph.nodes if info(n).kind != "compute"})
    lowered = time.perf_counter() - started
    seconds = {
        "capture": traced - running.seconds,
        "passes": running.seconds - verifying.seconds,
        "verify": verifying.seconds,
        "lower": lowered,
    }
    return {
        "layers": layers,
        "nodes": sum(len(phase.graph.nodes) for phase in schedule.phases),
        "seconds": {part: round(seconds[part], 3) for part in PARTS},
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def growth(rows: list[dict[str, Any]], first: int) -> dict[str, float]:
    """By part, of all and of all but capture, the exponent from the first depth of at least `first` layers (else the least)
    to the last."""
    low, high = next((row for row in rows if row["layers"] >= first), rows[0]), rows[-1]
    if low is high:
        return {}
    span = math.log(high["layers"] / low["layers"])
    parts = {part: (low["seconds"][part], high["seconds"][part]) for part in PARTS}
    parts["all"] = (sum(low["seconds"].values()), sum(high["seconds"].values()))
    parts["after capture"] = (parts["all"][0] - parts["capture"][0], parts["all"][1] - parts["capture"][1])
    return {part: math.log(b / a) / span for part, (a, b) in parts.items()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| layers | nodes | " + " | ".join(f"{part}, s" for part in PARTS) + " | all, s | peak memory |"]
    lines.append("|---" * (len(PARTS) + 4) + "|")
    for row in rows:
        cells = " | ".join(f"{row['seconds'][part]:.2f}" for part in PARTS)
        total = sum(row["seconds"].values())
        lines.append(f"| {row['layers']} | {row['nodes']:,} | {cells} | {total:.1f} | {row['peak_rss_mib']:,} MiB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="*", type=int, default=list(DEPTHS))
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure(given.layers[0])))
        return
    rows = []
    for layers in sorted(given.layers):
        command = [sys.executable, "-m", "benchmarks.compile_time", str(layers), "--here"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(answer.stdout.splitlines()[-1]))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}\n\ngrowth from 24: " + ", ".join(f"{p} {e:.2f}" for p, e in growth(rows, 24).items()))
    if given.json:
        result = {"machine": describe(), "rows": rows, "growth": growth(rows, 24)}
        Path(given.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
