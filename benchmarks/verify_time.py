"""How long the verifier takes, by the depth of the model: the schedule of the 175-billion-parameter GPT and of others like
it, all rules on, F = W = 128.

    python -m benchmarks.verify_time [LAYERS ...]      12 24 48 96 192 unless told

Prints a table and writes benchmarks/results/verify_time.json. Each figure is the median of five runs.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import fxshard
from benchmarks.machine import describe
from examples.models import GPT, GPT_175B
from fxshard.ir.verify import RULES, verify

DEPTHS = (12, 24, 48, 96, 192)
RESULT = Path(__file__).parent / "results" / "verify_time.json"
REPEATS = 5


def measure(layers: int) -> dict[str, Any]:
    config = dataclasses.replace(GPT_175B, layers=layers)
    torch._dynamo.reset()
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(1, config.length, dtype=torch.int64)
    started = time.perf_counter()
    schedule = fxshard.trace(model, {"tokens": tokens, "targets": tokens}, F=128, W=128)
    traced = time.perf_counter() - started
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        verify(schedule)
        seconds.append(time.perf_counter() - started)
    return {
        "layers": layers,
        "parameters": sum(flat.numel for flat in schedule.flats.values()),
        "nodes": sum(len(phase.graph.nodes) for phase in schedule.phases),
        "trace_s": round(traced, 1),
        "verify_s": round(statistics.median(seconds), 4),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| layers | parameters | nodes | verify, s | us a node | trace with all passes, s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        each = 1e6 * row["verify_s"] / row["nodes"]
        lines.append(
            f"| {row['layers']} | {row['parameters'] / 1e9:.1f} B | {row['nodes']:,} | {row['verify_s']:.3f} | {each:.1f} "
            f"| {row['trace_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    depths = [int(argument) for argument in sys.argv[1:]] or list(DEPTHS)
    rows = []
    for layers in depths:
        rows.append(measure(layers))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{len(RULES)} rules\n{table(rows)}")
    if depths == list(DEPTHS):
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps({"machine": describe(), "rules": len(RULES), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
