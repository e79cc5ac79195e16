"""Real kills: a rank of torchrun dies in a save or a step; the job goes on elsewhere with the losses of one that never died."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples import train_resumable
from fxshard import checkpoint

ROOT = Path(__file__).parent.parent.parent
STEPS, EVERY = 6, 2
TIMEOUT_S = 240.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def here(folder: Path, steps: int = STEPS) -> dict[int, float]:
    """Train in this process, which holds the only shard, from the last checkpoint in `folder`."""
    arguments = ["--directory", str(folder), "--steps", str(steps), "--every", str(EVERY), "--dtype", "float64"]
    return train_resumable.main(arguments)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    losses = here(tmp_path_factory.mktemp("uninterrupted"))
    assert list(losses) == list(range(1, STEPS + 1))
    assert losses[STEPS] < losses[1]
    return losses


def torchrun(folder: Path, W: int, F: int, kill: str = "-1 step 0") -> tuple[int, str, dict[int, float]]:
    """Train on W ranks of torchrun; its exit code, what it printed, and the losses."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(W)]
    command += ["-m", "tests.examples.killed_training", "--directory", str(folder), "--steps", str(STEPS)]
    command += ["--every", str(EVERY), "--dtype", "float64", "--F", str(F)]
    environment = {**os.environ, "KILL": kill, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE)}
    return process.returncode, output, losses


def check(losses: dict[int, float], expected: dict[int, float], first: int) -> None:
    """The losses from step `first` on, as far as they came, are those of the run that was not interrupted."""
    assert list(losses) == list(range(first, first + len(losses)))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-12, abs=0)


def unfinished(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".tmp-" in path.name]


def test_killed_in_a_save_and_in_a_step(uninterrupted: dict[int, float], tmp_path: Path) -> None:
    """2 ranks, killed while they write step 4; 3 ranks, killed in step 5 after they saved 4; one process to the end."""
    code, output, losses = torchrun(tmp_path / "run", 2, 2, kill="1 write 150")  # it writes 96 values a save
    assert code != 0 and "SIGKILL" in output, output
    check(losses, uninterrupted, 1)
    assert list(losses) == [1, 2, 3, 4], output
    folder = tmp_path / "run"
    (left,) = unfinished(folder)
    assert left.name.startswith("step-00000004.tmp-")
    assert (left / "__1_0.distcp").exists() and not (left / ".metadata").exists()
    assert checkpoint.latest(folder) == folder / "step-00000002"

    code, output, losses = torchrun(folder, 3, 3, kill="2 step 3")
    assert code != 0 and "SIGKILL" in output, output
    assert "goes on after step 2 with 3 ranks" in output
    check(losses, uninterrupted, 3)
    assert list(losses) == [3, 4], output
    assert unfinished(folder) == []
    assert checkpoint.latest(folder) == folder / "step-00000004"

    losses = here(folder)
    check(losses, uninterrupted, 5)
    assert list(losses) == [5, 6]
    assert checkpoint.latest(folder) == folder / "step-00000006"


@pytest.mark.full
@pytest.mark.parametrize(
    ("W", "F", "kill", "last", "V", "G"),
    [
        *((2, 2, f"0 fsync {n}", 2, 3, 3) for n in (6, 7, 8, 9)),  # its file, the metadata, what is plain, the folder
        (2, 2, "0 fsync 10", 4, 3, 3),  # the name is given: this one counts
        (4, 2, "3 fsync 2", 2, 2, 1),
        (3, 1, "1 fsync 2", 2, 4, 4),
        (1, 1, "0 fsync 8", 2, 4, 2),
        (4, 4, "2 step 4", 2, 3, 1),
        (3, 3, "0 step 6", 4, 2, 2),
    ],
)
def test_killed_anywhere(
    uninterrupted: dict[int, float], tmp_path: Path, W: int, F: int, kill: str, last: int, V: int, G: int
) -> None:
    """W ranks, killed, leave a last finished checkpoint; V ranks go on from it to the end."""
    code, output, losses = torchrun(tmp_path, W, F, kill)
    assert code != 0 and "SIGKILL" in output, output
    check(losses, uninterrupted, 1)
    assert checkpoint.latest(tmp_path) == tmp_path / f"step-{last:08d}", output
    code, output, losses = torchrun(tmp_path, V, G)
    assert code == 0, output
    check(losses, uninterrupted, last + 1)
    assert list(losses)[-1] == STEPS
    assert unfinished(tmp_path) == []
