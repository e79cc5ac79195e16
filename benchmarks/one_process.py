"""What fxshard costs where nothing is communicated: steps of one process, beside eager and the bare captured graph.

    python -m benchmarks.one_process [--model tiny] [--json FILE]

`tiny` is a GPT of 24 blocks of width 64 on a few tokens, whose step is host time; `gpt_512x6` one whose step is operators.
Systems: eager; captured, which is torch.compile with AOTAutograd's graphs and no compiler behind them; fxshard in a world
of one, and in a virtual world of four shards. Each step is forward, backward and AdamW, in turns, medians; ratios first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxshard
from benchmarks.machine import describe
from examples import models

TINY = models.GPTConfig(layers=24, width=64, heads=4, vocabulary=64, length=16)

SYSTEMS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "captured": lambda model: torch.compile(model, backend="aot_eager_default_partitioner"),
    "fxshard": lambda model: fxshard.compile(model, 1),
    "fxshard F=4": lambda model: fxshard.compile(model, 4),
}


def build(name: str) -> tuple[Callable[[], nn.Module], dict[str, Tensor]]:
    if name != "tiny":
        make, make_inputs = models.get(name)
        return make, make_inputs(batch=1, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(TINY.vocabulary, (1, TINY.length), generator=torch.Generator().manual_seed(0))
    return lambda: models.GPT(TINY), {"tokens": tokens, "targets": tokens}


class Stepper:
    """One system with its optimizer; `parts` are the seconds of forward, backward and optimizer of the last step."""

    def __init__(self, system: str, make: Callable[[], nn.Module], inputs: dict[str, Tensor]):
        torch.manual_seed(0)
        self.model, self.inputs = SYSTEMS[system](make()), inputs
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.parts: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def step(self) -> float:
        started = time.perf_counter()
        loss = self.model(**self.inputs)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        ended = time.perf_counter()
        self.parts = forward - started, backward - forward, ended - backward
        return float(loss.detach())


def measure(name: str, rounds: int) -> dict[str, Any]:
    make, inputs = build(name)
    steppers = {system: Stepper(system, make, inputs) for system in SYSTEMS}
    for _ in range(3):
        losses = {system: stepper.step() for system, stepper in steppers.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise AssertionError(f"losses differ: {losses}")
    parts: dict[str, list[tuple[float, float, float]]] = {system: [] for system in SYSTEMS}
    order = list(SYSTEMS)
    for turn in range(rounds):
        for system in order[turn % len(order) :] + order[: turn % len(order)]:
            steppers[system].step()
            parts[system].append(steppers[system].parts)
    totals = {system: statistics.median(sum(p) for p in found) for system, found in parts.items()}
    return {
        "ratios": {f"{system}/eager": totals[system] / totals["eager"] for system in SYSTEMS if system != "eager"},
        "seconds": totals,
        "parts": {s: [statistics.median(p[i] for p in found) for i in range(3)] for s, found in parts.items()},
    }


def table(name: str, result: dict[str, Any]) -> str:
    lines = [f"{name}", ""]
    lines += [f"  {pair:20} {ratio:6.3f}" for pair, ratio in result["ratios"].items()]
    lines += ["", f"  {'ms a step':14} {'all':>8} {'forward':>8} {'backward':>8} {'optimizer':>9}"]
    for system, seconds in result["seconds"].items():
        forward, backward, optimizer = (1e3 * part for part in result["parts"][system])
        lines.append(f"  {system:14} {1e3 * seconds:8.2f} {forward:8.2f} {backward:8.2f} {optimizer:9.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_process", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", choices=["tiny", *sorted(models.MODELS)])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", help="write the results to this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(given.model, given.rounds)
    print(table(given.model, result))
    if given.json:
        command = " ".join(["python", "-m", "benchmarks.one_process", *sys.argv[1:]])
        Path(given.json).write_text(json.dumps({"machine": describe(), "command": command, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
