"""Loops of transformers, Accelerate and Lightning Fabric on two ranks, held to one plain process with the same batches."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

import fxshard
from examples.frameworks import task

ROOT = Path(__file__).parent.parent.parent
STEPS = 4
TIMEOUT_S = 240.0


def torchrun(loop: str, folder: Path) -> list[float]:
    """The losses that the loop prints on two ranks; it saves its model into `folder`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", f"examples.frameworks.{loop}", "--steps", str(STEPS), "--save", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(STEPS))
    return [float(loss) for _, loss in found]


def plainly(every: int, warmup: int | None, total: int = 0, strides: int = 1) -> tuple[list[float], torch.nn.Module]:
    """One process: `every` batches a step; where there is a warm-up, `strides` steps of the learning rate for each."""
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = None if warmup is None else get_linear_schedule_with_warmup(optimizer, warmup, total)
    losses = []
    for number, batch in enumerate(task.loader(task.arguments(None, ["--steps", str(STEPS)]))):
        loss = model(**batch).loss
        (loss / every).backward()
        losses.append(float(loss.detach()))
        if (number + 1) % every == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            for _ in range(strides if schedule is not None else 0):
                schedule.step()
            optimizer.zero_grad()
    return losses, model


@pytest.mark.parametrize(
    ("loop", "every", "warmup", "total", "strides"),
    [
        ("transformers_loop", 1, 2, STEPS, 1),
        # Accelerate steps a schedule once for each process.
        pytest.param("accelerate_loop", 2, 4, 100, 2, marks=pytest.mark.full),
        pytest.param("fabric_loop", 1, None, 0, 1, marks=pytest.mark.full),
    ],
)
def test_a_loop_trains_as_one_plain_process(
    tmp_path: Path, loop: str, every: int, warmup: int | None, total: int, strides: int
) -> None:
    expected, model = plainly(every, warmup, total, strides)
    assert torchrun(loop, tmp_path) == pytest.approx(expected, abs=2e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("whole", [False, True])
def test_generate(whole: bool) -> None:
    """On the sharded model, and faster in `unsharded()`."""
    plain, model = task.build(), fxshard.compile(task.build(), F=2)
    prompt = torch.arange(1, 7).reshape(2, 3)
    with model.unsharded() if whole else contextlib.nullcontext():
        tokens = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert tokens.shape == (2, 11)
    assert torch.equal(tokens, plain.generate(prompt, max_new_tokens=8, do_sample=False))
