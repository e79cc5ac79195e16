"""Accelerate's plain loop: it starts the processes, gives out the batches, accumulates, clips and steps.

    torchrun --nproc-per-node 2 -m examples.frameworks.accelerate_loop

The model is not given to `accelerator.prepare`, which would replicate it by DDP; all else is. `accelerator.accumulate(model)`
finds the model's own `no_sync`. Two batches make a step.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import default_data_collator, get_linear_schedule_with_warmup

import fxshard
from examples.frameworks import task


def main() -> None:
    arguments = task.arguments(__doc__)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = fxshard.compile(fxshard.deferred_init(task.build), F=arguments.F)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2 * accelerator.num_processes, 100)
    data = task.Counting(arguments.batch * arguments.steps)
    loader = DataLoader(data, arguments.batch // accelerator.num_processes, collate_fn=default_data_collator)
    optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"step {number} loss {mean.item():.6f}", flush=True)
    if arguments.save:
        fxshard.checkpoint.save_safetensors(model, arguments.save)
    accelerator.end_training()


if __name__ == "__main__":
    main()
