"""A loop of one's own around a model of transformers.

torchrun --nproc-per-node 2 -m examples.frameworks.transformers_loop --save out/llama
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import get_linear_schedule_with_warmup

import fxshard
from examples.frameworks import task


def main() -> None:
    arguments = task.arguments(__doc__)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = fxshard.compile(fxshard.deferred_init(task.build), F=arguments.F)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, arguments.steps)
    for number, batch in enumerate(task.loader(arguments, rank, world_size)):
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {number} loss {mean.item() / world_size:.6f}", flush=True)
    if arguments.save:
        fxshard.checkpoint.save_safetensors(model, arguments.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
