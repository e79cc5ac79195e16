"""Train a small byte-level GPT on English text, sharded.

    torchrun --nproc-per-node 4 -m examples.train_gpt --F 2
    python -m examples.train_gpt --F 4          # one process that holds all four shards

Of the training loop only the line with `fxshard.compile` differs from training on one device; around it are the process
group, batches of each rank's own and the mean of the validation losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import fxshard
from examples import models, ranks, text

LENGTH = models.GPT_DEMO.length
VALIDATION_BATCHES = 4


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_gpt", description="Train a small GPT, sharded, on English text.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank and step (default 8)")
    parser.add_argument("--F", type=int, help="ranks that share one copy of the parameters (default: all of them)")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="to gather and compute in")
    parser.add_argument("--show", action="store_true", help="print the schedule of a step")
    parser.add_argument("--render", metavar="FILE.svg", type=svg, help="draw the schedule of a step")
    return parser.parse_args(argv)


def svg(path: str) -> str:
    if not path.endswith(".svg"):
        raise argparse.ArgumentTypeError(f"{path!r}: pictures are .svg")
    return path


def main(argv: list[str] | None = None) -> float:
    """Train, and return the validation loss."""
    options = arguments(argv)
    device, launched, rank, world_size = ranks.join()

    torch.manual_seed(0)
    build, _ = models.get("gpt_demo")
    training, validation = text.split()
    precision = fxshard.MixedPrecision(param=torch.bfloat16, reduce=torch.float32)
    model = fxshard.compile(
        build(device=device), F=options.F, mixed_precision=precision if options.precision == "bf16" else None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    def batch(source: Tensor, number: int) -> dict[str, Tensor]:
        inputs = text.sample(source, options.batch, LENGTH, seed=number * world_size + rank)
        return {name: value.to(device) for name, value in inputs.items()}

    console = Console(quiet=rank != 0)
    with progress(console, "train", options.steps, "loss of rank 0's batch") as advance:
        for step in range(options.steps):
            loss = model(**batch(training, step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(loss.item())

    schedule = model.schedule if options.steps else None
    model.eval()
    with torch.no_grad():
        total = sum(model(**batch(validation, number)) for number in range(VALIDATION_BATCHES))
    if launched:
        dist.all_reduce(total)
    loss = float(total) / (VALIDATION_BATCHES * world_size)
    console.print(f"validation loss {loss:.3f}", highlight=False)
    if rank == 0 and schedule is not None:
        if options.show:
            print(schedule)
        if options.render:
            schedule.render(options.render)
            console.print(f"wrote {options.render}", highlight=False)
    if launched:
        dist.destroy_process_group()
    return loss


@contextmanager
def progress(console: Console, title: str, steps: int, what: str = "loss") -> Iterator[Callable[[float], None]]:
    """A progress bar, or ten lines where there is no terminal. Call what it yields with the loss of each step."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=steps, note="starting")
            yield lambda loss: bar.update(task, advance=1, note=f"{what} {loss:.3f}")
        return
    done = 0

    def line(loss: float) -> None:
        nonlocal done
        done += 1
        if done in (1, steps) or done % max(1, steps // 10) == 0:
            console.print(f"{title}  step {done} of {steps}  {what} {loss:.3f}", highlight=False)

    yield line


if __name__ == "__main__":
    main()
