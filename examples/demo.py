"""The same training run three ways: sharded by fxshard over processes, under DDP, and in one process.

    python -m examples.demo

All three start from the same weights and see the same batches, so their losses may differ only by the order in which
floating-point sums are taken. Prints the schedule of the sharded step, the losses side by side and what each rank
holds, and draws the schedule to out/step.svg.
"""

from __future__ import annotations

import argparse
import math
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxshard
from examples import models, text
from examples.train_gpt import progress
from fxshard.ir.nodes import bytes_text

PATIENCE_S = 150.0
"""How long any process waits for another before it gives up, in seconds."""

TOLERANCE = 1e-3
"""How far apart the losses of two runs may be. Sums in another order make 1e-7 at first, and Adam lets it grow."""

STYLES = {"CAST": "cyan", "LIMIT": "cyan", "AG": "cyan", "RS": "magenta", "AR": "yellow", "FWD": "dim", "GRAD": "dim"}
"""Colours of a schedule's lines, by operation: each queue with collectives has one."""


@dataclass(frozen=True)
class Settings:
    """One demo: W processes, F of them share one copy of the parameters; `batch` sequences a rank and step."""

    W: int
    F: int
    steps: int
    batch: int
    lr: float
    picture: str


@dataclass(frozen=True)
class Message:
    """What a rank tells the parent: `kind` is loss, bytes, schedule, or picture."""

    rank: int
    run: str
    kind: str
    value: Any


# -- one training run, on any kind of model


def build() -> nn.Module:
    torch.manual_seed(0)
    return models.get("gpt_demo")[0]()


def inputs(training: Tensor, settings: Settings, step: int, rank: int) -> dict[str, Tensor]:
    return text.sample(training, settings.batch, models.GPT_DEMO.length, seed=step * settings.W + rank)


def train(
    model: nn.Module, settings: Settings, ranks: Iterable[int], report: Callable[[int, float], None]
) -> dict[str, int]:
    """Train on the batches of `ranks`, one after another, gradients averaged over them. Returns bytes held, by what."""
    training, _ = text.split()
    ranks = list(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
    held: dict[str, int] = {}
    for step in range(settings.steps):
        for rank in ranks:
            loss = model(**inputs(training, settings, step, rank))
            (loss / len(ranks)).backward()
            report(rank, loss.item())
        optimizer.step()
        if step == settings.steps - 1:
            held = {
                "parameters": memory(model.parameters()),
                "gradients": memory(p.grad for p in model.parameters()),
                "optimizer state": memory(t for state in optimizer.state.values() for t in state.values()),
            }
        optimizer.zero_grad()
    return held


def memory(tensors: Iterable[Any]) -> int:
    """Bytes of the memory behind tensors, each piece of memory once; of a sharded one, what this rank holds."""
    local = [getattr(t, "local", t) for t in tensors if isinstance(t, Tensor)]
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(storages.values())


# -- what each process runs


def worker(rank: int, settings: Settings, port: int, messages: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # on Ctrl-C end without a traceback a process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.W, timeout=patience)

    def run(name: str, model: nn.Module) -> dict[str, int]:
        return train(model, settings, [rank], lambda r, loss: messages.put(Message(r, name, "loss", loss)))

    model = fxshard.compile(build(), F=settings.F, timeout_s=PATIENCE_S)
    held = run("fxshard", model)
    schedule = model.schedule
    held["communication buffers"] = schedule.memory.arena_bytes + schedule.memory.resident_bytes
    messages.put(Message(rank, "fxshard", "bytes", held))
    messages.put(Message(rank, "fxshard", "schedule", str(schedule)))

    # Gradients as views of the buckets, or DDP would hold them twice.
    held = run("DDP", DistributedDataParallel(build(), gradient_as_bucket_view=True))
    messages.put(Message(rank, "DDP", "bytes", held))

    if rank == 0:
        schedule.render(settings.picture)
        messages.put(Message(rank, "fxshard", "picture", settings.picture))
    dist.destroy_process_group()


class Processes:
    """W processes and what they say. Leaving the `with` block ends them, whatever happened."""

    def __init__(self, settings: Settings):
        self.settings = settings
        # The store's server lives here and keeps the port it was given: nobody can take it in between.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.messages = mp.get_context("spawn").Queue()
        self.losses: dict[tuple[str, int], list[float]] = {}
        self.told: dict[tuple[str, str, int], Any] = {}

    def __enter__(self) -> Processes:
        # Blocked while they start, and inherited: Ctrl-C in the middle of their imports is ours to answer.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            arguments = (self.settings, self.store.port, self.messages)
            self.context = mp.start_processes(worker, arguments, self.settings.W, join=False, start_method="spawn")
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return self

    def __exit__(self, *_: object) -> None:
        for end in ("terminate", "kill"):
            for process in self.context.processes:
                if process.is_alive():
                    getattr(process, end)()
            for process in self.context.processes:
                process.join(5)
        self.messages.close()
        self.messages.cancel_join_thread()

    def follow(self, run: str, console: Console) -> None:
        """Receive until every rank has reported every step of a run and what it holds, under a progress bar."""
        W, steps = self.settings.W, self.settings.steps
        with progress(console, f"{run:<11}", steps) as advance:
            shown = 0
            while shown < steps or any((run, "bytes", rank) not in self.told for rank in range(W)):
                self.receive()
                while all(len(self.losses.get((run, rank), ())) > shown for rank in range(W)):
                    advance(mean(self.losses[run, rank][shown] for rank in range(W)))
                    shown += 1

    def mean_losses(self, run: str) -> list[float]:
        return [mean(step) for step in zip(*(self.losses[run, rank] for rank in range(self.settings.W)))]

    def answer(self, run: str, kind: str) -> Any:
        """What rank 0 told, waited for."""
        while (run, kind, 0) not in self.told:
            self.receive()
        return self.told[run, kind, 0]

    def receive(self) -> None:
        """Take in one message. Raises what a process died of, or TimeoutError when all are silent for too long."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ended = self.context.join(timeout=0)
            try:
                message: Message = self.messages.get(timeout=0.2)
            except queue.Empty:
                if ended:
                    raise RuntimeError("the processes ended and did not say everything") from None
                continue
            if message.kind == "loss":
                self.losses.setdefault((message.run, message.rank), []).append(message.value)
            else:
                self.told[message.run, message.kind, message.rank] = message.value
            return
        raise TimeoutError(f"no process said anything for {PATIENCE_S:g} s")


# -- what the parent runs and shows


def single_process(settings: Settings, console: Console) -> tuple[list[float], dict[str, int]]:
    losses: list[float] = []
    with progress(console, "one process", settings.steps) as advance:

        def report(rank: int, loss: float) -> None:
            losses.append(loss)
            if rank == settings.W - 1:
                advance(mean(losses[-settings.W :]))

        held = train(build(), settings, range(settings.W), report)
    return [mean(losses[i : i + settings.W]) for i in range(0, len(losses), settings.W)], held


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def show_schedule(console: Console, schedule: str) -> None:
    for line in schedule.splitlines():
        if line.startswith("  "):
            style = STYLES.get(line.split()[0], "")
        else:
            style = "dim" if line.startswith("#") else "bold"
        console.print(Text(line, style=style), soft_wrap=True)


def loss_table(losses: dict[str, list[float]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Loss of a step, mean over the ranks", title_justify="left")
    table.add_column("step", justify="right")
    for run in losses:
        table.add_column(run, justify="right", style="bold" if run == "fxshard" else "")
    others = [run for run in losses if run != "fxshard"]
    for run in others:
        table.add_column(f"vs {run}", justify="right", style="cyan")
    steps = len(losses["fxshard"])
    every = max(1, steps // 10)
    for step in sorted({0, *range(every - 1, steps, every), steps - 1}):
        ours = losses["fxshard"][step]
        differences = [f"{ours - losses[run][step]:+.1e}" for run in others]
        table.add_row(str(step + 1), *(f"{run[step]:.6f}" for run in losses.values()), *differences)
    return table


def memory_table(held: dict[str, dict[str, int]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Bytes a rank holds", title_justify="left", show_footer=True)
    table.add_column("", footer="total")
    for run, rows in held.items():
        total = bytes_text(sum(rows.values()))
        table.add_column(run, justify="right", style="bold" if run == "fxshard" else "", footer=total)
    for row in held["fxshard"]:
        table.add_row(row, *(bytes_text(rows[row]) if row in rows else "-" for rows in held.values()))
    return table


def verdict(losses: dict[str, list[float]]) -> str:
    """How far the runs are apart. Raises RuntimeError if it is more than sums in another order explain."""
    apart = {
        run: max(abs(ours - theirs) for ours, theirs in zip(losses["fxshard"], losses[run]))
        for run in losses
        if run != "fxshard"
    }
    words = ", ".join(f"{value:.1e} from {run}" for run, value in apart.items())
    if max(apart.values()) > TOLERANCE:
        raise RuntimeError(f"the losses of fxshard are too far from the others: at most {words}")
    return f"The losses of fxshard are at most {words}."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="demo", description="One training run under fxshard, DDP and one process.")
    parser.add_argument("--W", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--F", type=int, default=2, help="of these, how many share one copy of the parameters")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank and step (default 2)")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--picture", default="out/step.svg", help="where to draw the schedule (default out/step.svg)")
    settings = Settings(**vars(parser.parse_args(argv)))
    if settings.W < 1 or settings.F < 1 or settings.W % settings.F or settings.steps < 1 or settings.batch < 1:
        parser.error("W, F, steps and batch are positive, and F divides W")
    torch.set_num_threads(1)
    console = Console(highlight=False)
    try:
        demo(settings, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)
    except (mp.ProcessRaisedException, mp.ProcessExitedException, RuntimeError, TimeoutError) as error:
        sys.exit(f"demo: {error}")


def demo(settings: Settings, console: Console) -> None:
    Path(settings.picture).parent.mkdir(parents=True, exist_ok=True)
    replicas = settings.W // settings.F
    console.print(
        f"A GPT of {sum(p.numel() for p in build().parameters()):,} parameters learns English byte by byte, "
        f"{settings.steps} steps, three ways:\n"
        f"  fxshard      {settings.W} processes, F={settings.F}: {replicas} x the parameters, in {settings.F} shards\n"
        f"  DDP          {settings.W} processes, each with all parameters\n"
        f"  one process  the {settings.W} batches of a step one after another\n"
    )
    with Processes(settings) as processes:
        for run in ("fxshard", "DDP"):
            processes.follow(run, console)
        alone, held_alone = single_process(settings, console)
        losses = {run: processes.mean_losses(run) for run in ("fxshard", "DDP")} | {"one process": alone}
        held = {run: processes.answer(run, "bytes") for run in ("fxshard", "DDP")} | {"one process": held_alone}

        console.print(Rule("The schedule of a step"))
        show_schedule(console, processes.answer("fxshard", "schedule"))
        console.print(Rule("Results"))
        console.print(loss_table(losses))
        console.print(verdict(losses))
        console.print()
        console.print(memory_table(held))
        console.print("Communication buffers are those of a few units; more units need no more.")
        picture = processes.answer("fxshard", "picture")
        console.print(f"\nThe schedule as a picture: {picture}", soft_wrap=True)


if __name__ == "__main__":
    main()
