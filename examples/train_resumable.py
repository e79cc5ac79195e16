"""Train a small GPT in a job that may be killed at any moment, and goes on from its last checkpoint on any number of ranks.

    torchrun --nproc-per-node 2 -m examples.train_resumable --directory out/run
    torchrun --nproc-per-node 3 -m examples.train_resumable --directory out/run     # after a kill, on what there is
    python -m examples.train_resumable --directory out/run --F 4                    # one process that holds four shards

What makes the losses those of a run that was never killed: a step's samples depend on the step alone, and every rank takes
its share of them, so any number of ranks that divides the batch sees the same batches; whatever else changes from step to
step (parameters, optimizer, learning rate) is in the checkpoint.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import fxshard
from examples import models, ranks, text
from fxshard import checkpoint

CONFIG = models.GPTConfig(layers=3, width=48, heads=4, vocabulary=256, length=32, tied=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train_resumable", description="Train a small GPT that survives kills.")
    parser.add_argument("--directory", required=True, help="where checkpoints are; all ranks see it")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next (default 10)")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay (default 2)")
    parser.add_argument("--batch", type=int, default=12, help="sequences a step, of all ranks together (default 12)")
    parser.add_argument("--F", type=int, help="ranks that share one copy of the parameters (default: all of them)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> dict[int, float]:
    """Train, and return the loss of each step that was done here."""
    options = arguments(argv)
    device, launched, rank, world_size = ranks.join()
    if options.batch % world_size:
        raise SystemExit(f"train_resumable: {world_size} ranks do not divide a batch of {options.batch} sequences")

    torch.manual_seed(0)
    training, _ = text.split()
    model = fxshard.compile(models.GPT(CONFIG, device=device, dtype=getattr(torch, options.dtype)), F=options.F)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    done = 0
    if checkpoint.latest(options.directory) is not None:
        extra = checkpoint.load(options.directory, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        done = extra["step"]
        if rank == 0:
            print(f"goes on after step {done} with {world_size} ranks", flush=True)

    losses = {}
    for step in range(done + 1, options.steps + 1):
        samples = text.sample(training, options.batch, CONFIG.length, seed=step)
        loss = model(**{name: value[rank::world_size].to(device) for name, value in samples.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        total = loss.detach().clone()
        if launched:
            dist.all_reduce(total)
        losses[step] = total.item() / world_size
        if rank == 0:
            print(f"step {step} loss {losses[step]!r}", flush=True)
        if step % options.every == 0:
            checkpoint.save(
                options.directory, model, optimizer, step=step, keep=options.keep, scheduler=scheduler.state_dict()
            )
    if launched:
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
