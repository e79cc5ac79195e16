"""Lightning Fabric: its ModelParallelStrategy leaves the parallelism to a function, which is `fxshard.compile` here.

torchrun --nproc-per-node 2 -m examples.frameworks.fabric_loop
"""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy

import fxshard
from examples.frameworks import task


def main() -> None:
    arguments = task.arguments(__doc__)
    world_size = int(os.environ.get("WORLD_SIZE", 1))

    def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        return fxshard.compile(model, F=arguments.F)

    strategy = ModelParallelStrategy(shard, data_parallel_size=world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(fxshard.deferred_init(task.build))
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    loader = task.loader(arguments, fabric.global_rank, fabric.world_size)
    for number, batch in enumerate(fabric.setup_dataloaders(loader, use_distributed_sampler=False)):
        loss = model(**batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean: Any = fabric.all_reduce(loss.detach())
        fabric.print(f"step {number} loss {float(mean):.6f}", flush=True)
    if arguments.save:
        fxshard.checkpoint.save_safetensors(model.module, arguments.save)


if __name__ == "__main__":
    main()
