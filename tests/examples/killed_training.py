"""examples.train_resumable on ranks of torchrun, one of which ends itself by SIGKILL where the environment says.

KILL="<rank> <where> <n>": at the n-th time (from 1) that this rank is
    write  about to write a value into a file of a checkpoint, so some are there and some are not
    fsync  about to make a file or folder durable
    step   between a backward and its optimizer step
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from examples import train_resumable


def main() -> None:
    torch.set_num_threads(1)
    rank, where, number = os.environ.get("KILL", "-1 step 0").split()
    if os.environ["RANK"] == rank:
        kill = after(int(number))
        if where == "write":
            torch.save = before(torch.save, kill)
        elif where == "fsync":
            os.fsync = before(os.fsync, kill)
        else:
            register_optimizer_step_pre_hook(lambda *_: kill())
    train_resumable.main()


def after(number: int) -> Callable[[], None]:
    """A function that ends this process at its `number`-th call."""
    calls = 0

    def kill() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def before(call: Callable[..., Any], kill: Callable[[], None]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        kill()
        return call(*args, **kwargs)

    return called


if __name__ == "__main__":
    main()
