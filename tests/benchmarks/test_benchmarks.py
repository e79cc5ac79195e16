"""The benchmarks as a user starts them, on small models: what they report is there and adds up, whatever the times are."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
SYSTEMS = "fxshard,fsdp2,fsdp1,ddp,plain"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, cwd=ROOT)


def report(path: Path, *command: str) -> dict[str, Any]:
    done = run(*command, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    assert {"torch", "processor", "commit"} <= set(found["machine"])
    return found


def step(path: Path, model: str, *options: str) -> dict[str, Any]:
    return report(
        path, "benchmarks.step", "--model", model, "--rounds", "3", "--systems", SYSTEMS, "--hosts", "1", *options
    )


def test_a_step_beside_its_peers(tmp_path: Path) -> None:
    found = step(tmp_path / "step.json", "gpt_demo", "--ranks-per-host", "2")
    seconds = found["seconds"]
    assert set(seconds) == {*SYSTEMS.split(","), "compute", "communication"}
    assert found["ratios"] == {f"fxshard/{name}": seconds["fxshard"] / seconds[name] for name in SYSTEMS.split(",")[1:]}
    assert all(
        seconds[name] == statistics.median(all_) and len(all_) == 3 for name, all_ in found["all_seconds"].items()
    )
    limit = max(seconds["compute"], seconds["communication"])
    assert found["overlap_efficiency"] == limit / seconds["fxshard"]
    # What is sent does not depend on the machine: fully sharded, W = 2, half of all parameters leave a rank in each of
    # an AllGather and a ReduceScatter, and in another AllGather what is not kept for backward.
    whole, sent = 4 * found["model"]["parameters"], found["sent_bytes"]
    assert sent["compute"] < 0.01 * whole and sent["plain"] < 0.01 * whole
    assert whole < sent["fxshard"] < 1.51 * whole
    assert sent["communication"] == pytest.approx(sent["fxshard"], rel=0.01)
    assert sent["ddp"] == pytest.approx(whole, rel=0.01)
    assert sent["fsdp2"] > sent["fxshard"] and sent["fsdp1"] > sent["fxshard"]
    kinds = {name.split()[0] for name in found["exposed_s"]}
    assert kinds == {"all_gather", "reduce_scatter"}
    together = [loss for name, loss in found["loss"].items() if name != "plain"]  # each rank's own training
    assert len(together) == 4 and max(together) - min(together) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("options", [("--F", "1"), ("--F", "2", "--dtype", "bf16")], ids=" ".join)
def test_other_settings(tmp_path: Path, options: tuple[str, ...]) -> None:
    found = step(tmp_path / "step.json", "mlp_odd", "--ranks-per-host", "4", *options)
    assert found["world"]["W"] == 4 and found["world"]["F"] == int(options[1])
    reduces = {name.split()[0] for name in found["exposed_s"]} - {"all_gather"}
    assert reduces == ({"all_reduce"} if options[1] == "1" else {"reduce_scatter", "all_reduce"})


def test_peak_memory_by_kind(tmp_path: Path) -> None:
    systems = ("fxshard", "fsdp2", "ddp", "fxshard:keep_memory=True")
    command = ("benchmarks.memory", "--model", "gpt_demo", "--ranks", "2", "--systems", ",".join(systems))
    found = report(tmp_path / "memory.json", *command)
    peaks = found["peak_bytes"]
    assert set(peaks) == set(systems)
    assert found["ratios"]["fxshard/fsdp2"] == peaks["fxshard"]["total"] / peaks["fsdp2"]["total"]
    for kinds in peaks.values():
        assert sum(size for kind, size in kinds.items() if kind != "total") == kinds["total"] > 0
    whole = peaks["ddp"]["shards"]
    for system, share in zip(systems, (2, 2, 1, 2)):
        assert peaks[system]["shards"] == pytest.approx(whole / share, rel=0.01)
        assert peaks[system]["moments"] == pytest.approx(2 * whole / share, rel=0.01)
        assert (peaks[system]["arena"] > 0) == system.startswith("fxshard")
    assert peaks["fxshard:keep_memory=True"]["gradients"] == pytest.approx(whole / 2, rel=0.01)
    assert peaks["ddp"]["gradients"] == pytest.approx(whole, rel=0.01)
    assert peaks["fsdp2"]["gathered"] > 0 and peaks["fsdp2"]["communication"] > 0


def test_wrong_systems_and_models_are_refused() -> None:
    done = run("benchmarks.step", "--systems", "fxshard,fsdp3")
    assert done.returncode == 2 and "unknown fsdp3 (allowed: fxshard, fsdp2" in done.stderr
    done = run("benchmarks.step", "--model", "gpt")
    assert done.returncode == 2 and "gpt_512x6" in done.stderr


@pytest.mark.full
def test_one_process(tmp_path: Path) -> None:
    found = report(tmp_path / "one.json", "benchmarks.one_process", "--rounds", "3")
    assert set(found["ratios"]) == {"captured/eager", "fxshard/eager", "fxshard F=4/eager"}
    assert all(len(parts) == 3 and min(parts) > 0 for parts in found["parts"].values())


@pytest.mark.full
def test_compile_time(tmp_path: Path) -> None:
    found = report(tmp_path / "compile.json", "benchmarks.compile_time", "2", "4")
    small, large = found["rows"]
    assert (small["layers"], large["layers"]) == (2, 4) and small["nodes"] < large["nodes"] < 2 * small["nodes"]
    assert all(seconds > 0 for row in found["rows"] for seconds in row["seconds"].values())
