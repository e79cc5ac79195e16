"""All step benchmarks, one after the other, and the page about them.

    python -m benchmarks.suite                   every case, two minutes or more each; needs root, ip and tc for limited links
    python -m benchmarks.suite NAME ...          these; --list names them
    python -m benchmarks.suite --page            only write the tables of docs/benchmarks.md anew from benchmarks/results/suite

Each case is a command that can be run alone. Where links cannot be limited its line says so, and what was measured before
stays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import compile_time, memory, plot

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "suite"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "pictures" / "benchmarks.svg"
PEERS = "fxshard,fsdp2,fsdp1,ddp"
GOALS, STEPS, ABLATIONS, MEMORY, ONE, COMPILE = "goals", "steps", "ablations", "memory", "one process", "compiling"


@dataclass(frozen=True)
class Case:
    """`what` as the page says it; `module` of benchmarks with its arguments."""

    what: str
    module: str
    arguments: tuple[str, ...]

    @property
    def needs_links(self) -> bool:
        return "--rate" in self.arguments


def step(what: str, links: str, hosts: int, per_host: int = 1, *more: str, systems: str = PEERS) -> Case:
    rate = () if links == "loopback" else ("--rate", links)
    world = ("--hosts", str(hosts), "--ranks-per-host", str(per_host), *rate)
    return Case(what, "step", (*world, "--rounds", "7", "--systems", systems, *more))


NO_OVERLAP = "fxshard:forward_prefetch=0+backward_prefetch=0+rate_limit=1"

WITHOUT = {
    "fxshard": "as it is by default",
    "fxshard:forward_prefetch=0": "no forward prefetch",
    "fxshard:backward_prefetch=0": "no backward prefetch",
    NO_OVERLAP: "neither, and one unit at a time: what is gathered is waited for where it is used",
    "fxshard:keep_root_resident=False": "the root is freed after forward and gathered again",
    "fxshard:rate_limit=1": "at most one unit gathered at a time",
    "fxshard:rate_limit=3": "at most three",
    "fxshard:rate_limit=None": "no limit",
    "fxshard:rate_limit=3+forward_prefetch=2+backward_prefetch=2": "at most three, two gathered ahead",
    "fxshard:reshard_after_forward=False": "nothing is freed after forward",
    "fxshard:keep_memory=True": "the memory of gradients is kept",
    "fxshard:reduce=bf16": "gradients on the wire in bf16",
}
"""What is turned off or on, by system."""

CASES = {
    "full_2x1_1gbit": step("full shard, 2 hosts, 1 Gbit", "1gbit", 2),
    "full_4x1_1gbit": step("full shard, 4 hosts, 1 Gbit", "1gbit", 4),
    "full_2x1_200mbit": step("full shard, 2 hosts, 200 Mbit", "200mbit", 2),
    "full_1x2_loopback": step(
        "full shard, 2 ranks, loopback", "loopback", 1, 2, systems=f"{PEERS},fsdp2-compiled,plain"
    ),
    "full_1x4_loopback": step("full shard, 4 ranks, loopback", "loopback", 1, 4),
    "replicate_2x1_1gbit": step("F=1, 2 hosts, 1 Gbit", "1gbit", 2, 1, "--F", "1"),
    "replicate_2x1_200mbit": step("F=1, 2 hosts, 200 Mbit", "200mbit", 2, 1, "--F", "1"),
    "replicate_1x2_loopback": step("F=1, 2 ranks, loopback", "loopback", 1, 2, "--F", "1"),
    "hybrid_2x2_1gbit": step("hybrid F=2, 2 hosts of 2 ranks, 1 Gbit", "1gbit", 2, 2, "--F", "2"),
    "hybrid_2x2_200mbit": step("hybrid F=2, 2 hosts of 2 ranks, 200 Mbit", "200mbit", 2, 2, "--F", "2"),
    "bf16_2x1_1gbit": step("full shard, bf16, 2 hosts, 1 Gbit", "1gbit", 2, 1, "--dtype", "bf16"),
    "gpt768_2x1_1gbit": step("full shard, GPT 768x12, 2 hosts, 1 Gbit", "1gbit", 2, 1, "--model", "gpt_768x12"),
    "resnet_2x1_1gbit": step("full shard, ResNet, 2 hosts, 1 Gbit", "1gbit", 2, 1, "--model", "resnet_small"),
    "encdec_2x1_1gbit": step(
        "full shard, encoder-decoder, 2 hosts, 1 Gbit", "1gbit", 2, 1, "--model", "encoder_decoder_small"
    ),
    "ablations": Case(
        "full shard, 2 hosts, 1 Gbit",
        "step",
        ("--hosts", "2", "--rate", "1gbit", "--rounds", "7", "--systems", ",".join(WITHOUT)),
    ),
    "memory_2": Case("two ranks", "memory", ("--ranks", "2")),
    "memory_4": Case("four ranks", "memory", ("--ranks", "4")),
    "memory_ablations": Case("two ranks", "memory", ("--ranks", "2", "--systems", ",".join(WITHOUT))),
    "one_process_512x6": Case("GPT 512x6", "one_process", ("--model", "gpt_512x6", "--rounds", "15")),
    "one_process_tiny": Case("24 blocks of width 64", "one_process", ()),
    "compile_time": Case("175-billion-parameter GPT", "compile_time", ()),
}


STEP_CASES = [name for name, case in CASES.items() if case.module == "step" and name != "ablations"]
"""Those that measure fxshard beside its peers."""


@dataclass(frozen=True)
class Goal:
    """`path` leads to a number of a case's results that is to be at most (with `least`: at least) `limit`."""

    what: str
    case: str
    path: tuple[str, ...]
    limit: float
    least: bool = False


FSDP2, DDP = ("ratios", "fxshard/fsdp2"), ("ratios", "fxshard/ddp")

GOAL_LINES = (
    Goal("full shard, 2 hosts, 1 Gbit: fxshard / FSDP2", "full_2x1_1gbit", FSDP2, 0.50),
    Goal("full shard, 4 hosts, 1 Gbit: fxshard / FSDP2", "full_4x1_1gbit", FSDP2, 0.55),
    Goal("full shard, 4 ranks, loopback: fxshard / FSDP2", "full_1x4_loopback", FSDP2, 0.65),
    Goal("F=1, 2 hosts, 1 Gbit: fxshard / DDP", "replicate_2x1_1gbit", DDP, 1.00),
    Goal("F=1, 2 hosts, 200 Mbit: fxshard / DDP", "replicate_2x1_200mbit", DDP, 1.00),
    Goal("F=1, 2 ranks, loopback: fxshard / DDP", "replicate_1x2_loopback", DDP, 1.00),
    Goal("hybrid, 2 hosts of 2 ranks, 1 Gbit: fxshard / FSDP2", "hybrid_2x2_1gbit", FSDP2, 0.60),
    Goal("hybrid, 2 hosts of 2 ranks, 200 Mbit: fxshard / FSDP2", "hybrid_2x2_200mbit", FSDP2, 0.60),
    Goal("overlap efficiency, full shard, 2 hosts, 1 Gbit", "full_2x1_1gbit", ("overlap_efficiency",), 0.95, True),
    Goal("one process, F=1: fxshard / eager", "one_process_512x6", ("ratios", "fxshard/eager"), 1.02),
    Goal("the same, the captured graph alone / eager", "one_process_512x6", ("ratios", "captured/eager"), math.inf),
    Goal("host time, 24 blocks of width 64: fxshard / eager", "one_process_tiny", ("ratios", "fxshard/eager"), 1.00),
    Goal("peak memory, two ranks: fxshard / FSDP2", "memory_2", FSDP2, 0.90),
    Goal("peak memory, four ranks: fxshard / FSDP2", "memory_4", FSDP2, 0.90),
    Goal("whole compile of 96 blocks, s", "compile_time", ("96", "all"), 60.0),
    Goal("passes, verify and lower of 96 blocks, s", "compile_time", ("96", "after capture"), 15.0),
    Goal("growth of passes, verify and lower, exponent", "compile_time", ("growth", "after capture"), 1.1),
    Goal("growth of the whole compile, exponent", "compile_time", ("growth", "all"), 1.1),
)


def run(names: list[str]) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    may_limit = subprocess.run(["ip", "netns", "list"], capture_output=True).returncode == 0 and is_root()
    for name in names:
        case = CASES[name]
        if case.needs_links and not may_limit:
            print(f"{name}: left out, links of a limited rate need root, ip and tc", flush=True)
            continue
        print(f"\n== {name}: {case.what}", flush=True)
        out = (RESULTS / f"{name}.json").relative_to(ROOT)  # the result says its command
        command = [sys.executable, "-m", f"benchmarks.{case.module}", *case.arguments, "--json", str(out)]
        subprocess.run(command, check=True, cwd=ROOT)


def is_root() -> bool:
    return os.geteuid() == 0


def results() -> dict[str, dict[str, Any]]:
    """What was measured, by case; those never measured are not in it."""
    found = {name: RESULTS / f"{name}.json" for name in CASES}
    return {name: json.loads(path.read_text()) for name, path in found.items() if path.exists()}


# -- the page


def tables(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The tables of the page, by name."""
    return {
        GOALS: goals_table(found),
        STEPS: steps_table(found),
        ABLATIONS: ablations_table(found),
        MEMORY: memory_table(found),
        ONE: one_process_table(found),
        COMPILE: compile_table(found),
    }


def goals_table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| what | goal | measured | |", "|---|---|---|---|"]
    for goal in GOAL_LINES:
        if goal.case not in found:
            rows.append(f"| {goal.what} | {_goal(goal)} | not measured | |")
            continue
        value = number(found[goal.case], goal.path)
        met = value >= goal.limit if goal.least else value <= goal.limit
        word = "" if math.isinf(goal.limit) else "met" if met else "**missed**"
        rows.append(f"| {goal.what} | {_goal(goal)} | {value:.{1 if value >= 5 else 3}f} | {word} |")
    return "\n".join(rows)


def _goal(goal: Goal) -> str:
    return "" if math.isinf(goal.limit) else f"{'at least' if goal.least else 'at most'} {goal.limit:g}"


def number(result: dict[str, Any], path: tuple[str, ...]) -> float:
    """A number of a result; of compile times `after capture` is the sum of passes, verify and lower."""
    if "rows" in result and path[0] != "growth":
        row = next(row for row in result["rows"] if row["layers"] == int(path[0]))
        seconds = row["seconds"]
        return float(sum(seconds.values()) - (seconds["capture"] if path[1] == "after capture" else 0.0))
    value: Any = result
    for key in path:
        value = value[key]
    return float(value)


def steps_table(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        "| case | fxshard | / FSDP2 | / FSDP1 | / DDP | overlap efficiency | compute | communication | exposed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in filter(found.__contains__, STEP_CASES):
        result, cells = found[name], [CASES[name].what]
        cells.append(_ms(result["seconds"]["fxshard"]))
        for peer in ("fsdp2", "fsdp1", "ddp"):
            ratio = result["ratios"].get(f"fxshard/{peer}")
            cells.append("" if ratio is None else f"{ratio:.2f}")
        cells.append(f"{result['overlap_efficiency']:.2f}")
        cells += [_ms(result["seconds"]["compute"]), _ms(result["seconds"]["communication"])]
        cells.append(_ms(sum(result["exposed_s"].values())))
        rows.append(f"| {' | '.join(cells)} |")
    missing = [CASES[name].what for name in STEP_CASES if name not in found]
    return "\n".join(rows) + (f"\n\nNot measured yet: {'; '.join(missing)}." if missing else "")


def ablations_table(found: dict[str, dict[str, Any]]) -> str:
    if not {"ablations", "memory_ablations"} <= found.keys():
        return "not measured"
    seconds, peaks = found["ablations"]["seconds"], found["memory_ablations"]["peak_bytes"]
    sent = found["ablations"]["sent_bytes"]
    rows = ["| | step | / default | sent a step | peak memory |", "|---|---|---|---|---|"]
    for system, what in WITHOUT.items():
        ratio = seconds[system] / seconds["fxshard"]
        cells = [
            what,
            _ms(seconds[system]),
            f"{ratio:.2f}",
            f"{_mib(sent[system])} MiB",
            f"{_mib(peaks[system]['total'])} MiB",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def memory_table(found: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"| ranks | system | peak, MiB | {' | '.join(memory.KINDS)} |",
        "|---|---|---|" + "---|" * len(memory.KINDS),
    ]
    for name in ("memory_2", "memory_4"):
        if name not in found:
            continue
        for system, kinds in found[name]["peak_bytes"].items():
            cells = [CASES[name].what, system, _mib(kinds["total"]), *(_mib(kinds[kind]) for kind in memory.KINDS)]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f}"


def one_process_table(found: dict[str, dict[str, Any]]) -> str:
    rows = ["| model | system | step | / eager | forward | backward | optimizer |", "|---|---|---|---|---|---|---|"]
    for name, case in CASES.items():
        if case.module != "one_process" or name not in found:
            continue
        result = found[name]
        for system, seconds in result["seconds"].items():
            ratio = result["ratios"].get(f"{system}/eager", 1.0)
            parts = " | ".join(map(_ms, result["parts"][system]))
            rows.append(f"| {case.what} | {system} | {_ms(seconds)} | {ratio:.2f} | {parts} |")
    return "\n".join(rows)


def compile_table(found: dict[str, dict[str, Any]]) -> str:
    if "compile_time" not in found:
        return "not measured"
    result = found["compile_time"]
    exponents = ", ".join(f"{part} {exponent:.2f}" for part, exponent in result["growth"].items())
    return f"{compile_time.table(result['rows'])}\n\nGrowth, the exponent from 24 to 192 layers: {exponents}."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->"


def write_page() -> None:
    text = PAGE.read_text()
    for name, table in tables(results()).items():
        begin, end = marks(name)
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}{table}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text)
    PICTURE.write_text(picture(results()))


def picture(found: dict[str, dict[str, Any]]) -> str:
    """The steps of all cases as SVG."""
    return plot.steps({name: (CASES[name].what, found[name]) for name in STEP_CASES if name in found})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases (default: all)")
    parser.add_argument("--list", action="store_true", help="the cases and their commands")
    parser.add_argument("--page", action="store_true", help="only write the tables of docs/benchmarks.md")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CASES]:
        parser.error(f"unknown {', '.join(unknown)} (allowed: {', '.join(CASES)})")
    if given.list:
        for name, case in CASES.items():
            print(f"{name:24} python -m benchmarks.{case.module} {' '.join(case.arguments)}")
        return
    if not given.page:
        run(given.names or list(CASES))
    write_page()
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
