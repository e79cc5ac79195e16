"""The demo and the training job, as a user starts them, and the parts they are made of."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fxshard
from examples import demo, text, train_gpt
from examples.models import GPT_DEMO

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- the text


def test_the_text_is_english_and_split_once():
    training, validation = text.split(validation=0.1)
    assert len(training) > 300_000 and training.dtype == torch.uint8
    assert len(validation) == pytest.approx(0.1 * (len(training) + len(validation)), rel=1e-3)
    assert b" the " in bytes(training.tolist()) and b" the " in bytes(validation.tolist())


def test_targets_are_the_next_bytes():
    training, _ = text.split()
    batch = text.sample(training, batch=3, length=16, seed=5)
    assert batch["tokens"].shape == batch["targets"].shape == (3, 16)
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    whole = bytes(training.tolist())
    for row, following in zip(batch["tokens"], batch["targets"]):
        assert bytes(row.tolist()) + bytes(following[-1:].tolist()) in whole


def test_a_seed_gives_the_same_windows_and_another_gives_others():
    training, _ = text.split()
    one, same, other = (text.sample(training, 2, 32, seed) for seed in (1, 1, 2))
    assert torch.equal(one["tokens"], same["tokens"])
    assert not torch.equal(one["tokens"], other["tokens"])


# -- the demo


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What three steps print, and the picture."""
    picture = tmp_path_factory.mktemp("out") / "new" / "step.svg"
    return run("examples.demo", "--steps", "3", "--batch", "1", "--picture", str(picture)), picture


def test_the_demo_shows_the_same_losses_three_times(output):
    shown, _ = output
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([-+.\de]+) +([-+.\de]+) *$", shown, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 3]
    for row in rows:
        sharded, ddp, alone = map(float, row[1:4])
        assert sharded == pytest.approx(ddp, abs=2e-6)
        assert sharded == pytest.approx(alone, abs=2e-6)
        assert abs(float(row[4])) < 2e-6 and abs(float(row[5])) < 2e-6
    assert float(rows[0][1]) > float(rows[2][1])


def test_the_demo_shows_what_a_rank_holds(output):
    shown, _ = output
    rows = dict(re.findall(r"^ +(parameters|gradients|optimizer state) +(.+?) *$", shown, re.MULTILINE))
    # 4,902,912 parameters in fp32 are 18.7 MiB; half of them at F = 2; Adam keeps two values for each.
    assert rows["parameters"].split() == ["9.4", "MiB", "18.7", "MiB", "18.7", "MiB"]
    assert rows["gradients"].split() == ["9.4", "MiB", "18.7", "MiB", "18.7", "MiB"]
    assert rows["optimizer state"].split() == ["18.7", "MiB", "37.4", "MiB", "37.4", "MiB"]


def test_the_demo_shows_the_schedule_and_draws_it(output):
    shown, picture = output
    assert "schedule  W=4  F=2  replicas=2" in shown
    assert len(re.findall(r"^ +RS ", shown, re.MULTILINE)) == 8
    assert len(re.findall(r"^ +AR ", shown, re.MULTILINE)) == 8
    assert f"The schedule as a picture: {picture}" in shown.replace("\n", "")
    assert picture.read_text().lstrip().startswith(("<svg", "<?xml"))


def test_bytes_are_counted_once_and_of_the_piece():
    model = torch.nn.Linear(6, 5)
    weight, bias = model.parameters()
    assert demo.memory([weight, weight[1:], bias, None]) == (30 + 5) * 4
    sharded = fxshard.compile(torch.nn.Linear(6, 5), F=3, units="none")
    # In one process all three shards: 30 and 5 elements start at multiples of 4, and 40 at most make 3 shards of 16.
    assert demo.memory(sharded.parameters()) == 48 * 4


def test_the_demo_refuses_losses_that_are_apart():
    close, far = {"fxshard": [1.0, 2.0], "DDP": [1.0, 2.0 + 1e-6]}, {"fxshard": [1.0, 2.0], "DDP": [1.1, 2.0]}
    assert "1.0e-06 from DDP" in demo.verdict(close)
    with pytest.raises(RuntimeError, match=r"1\.0e-01 from DDP"):
        demo.verdict(far)


def test_a_process_that_fails_is_shown_and_ends_the_demo():
    """F does not divide W: every process raises in compile."""
    settings = demo.Settings(W=2, F=3, steps=1, batch=1, lr=1e-3, picture="unused.svg")
    refused = "F=3 is larger than the world size W=2"
    with (
        pytest.raises(torch.multiprocessing.ProcessRaisedException, match=refused),
        demo.Processes(settings) as processes,
    ):
        processes.follow("fxshard", Console())
    assert not any(process.is_alive() for process in processes.context.processes)


@pytest.mark.parametrize("wrong", [["--F", "3"], ["--W", "0"], ["--steps", "0"], ["--batch", "-1"]])
def test_wrong_sizes_are_refused_before_anything_starts(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        demo.main(wrong)
    assert ended.value.code == 2
    assert "F divides W" in capsys.readouterr().err


# -- the training job


def test_train_gpt_in_one_process_learns(capsys, tmp_path):
    picture = tmp_path / "step.svg"
    loss = train_gpt.main(["--steps", "4", "--batch", "2", "--F", "2", "--show", "--render", str(picture)])
    shown = capsys.readouterr().out
    assert loss < 5.0 < 5.545  # it starts at log(256) = 5.545 and falls
    assert f"validation loss {loss:.3f}" in shown
    assert "schedule  W=2  F=2  replicas=1" in shown
    assert picture.exists()


@pytest.mark.full
def test_train_gpt_under_torchrun_equals_one_process():
    """Against plain torch on the batches of all four ranks, to the three digits that are printed."""
    job = ["--steps", "3", "--batch", "1", "--F", "2", "--show"]
    shown = run("torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "examples.train_gpt", *job)
    assert "schedule  W=4  F=2  replicas=2" in shown
    assert len(re.findall(r"^train  step \d of 3", shown, re.MULTILINE)) == 3, "rank 0 alone prints"
    training, validation = text.split()
    model = demo.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step in range(3):
        for rank in range(4):
            (model(**text.sample(training, 1, train_gpt.LENGTH, seed=step * 4 + rank)) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        seeds = range(4 * train_gpt.VALIDATION_BATCHES)
        losses = [model(**text.sample(validation, 1, train_gpt.LENGTH, seed=seed)).item() for seed in seeds]
    (found,) = re.findall(r"^validation loss (\S+)$", shown, re.MULTILINE)
    assert float(found) == pytest.approx(demo.mean(losses), abs=6e-4)


def test_progress_prints_ten_lines_where_there_is_no_terminal(capsys):
    with train_gpt.progress(Console(highlight=False), "x", 40) as advance:
        for step in range(40):
            advance(float(step))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "x  step 1 of 40  loss 0.000" and lines[-1] == "x  step 40 of 40  loss 39.000"
    assert len(lines) == 11


def test_windows_fit_the_model():
    assert GPT_DEMO.vocabulary == 256 and GPT_DEMO.length == train_gpt.LENGTH
