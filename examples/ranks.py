"""Where a job runs: its device, and its ranks if torchrun started it."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def join() -> tuple[torch.device, bool, int, int]:
    """Initialise the process group if torchrun launched this process; else one process holds all F shards.

    Returns the device, whether it was launched, the rank and the world size.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    launched = "RANK" in os.environ
    if not launched:
        return device, launched, 0, 1
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, launched, dist.get_rank(), dist.get_world_size()
