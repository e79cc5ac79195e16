"""The pictures of the docs, from schedules traced without devices: `make pictures`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fxshard
from examples.models import GPT, GPTConfig

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def gpt(layers: int, F: int, W: int, **options: Any) -> fxshard.Schedule:
    """The schedule of a GPT's training step, with `fxshard.trace`'s options; the model has no memory."""
    config = GPTConfig(layers=layers, width=512, heads=8, vocabulary=8192, length=256)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(8, config.length, dtype=torch.int64)
    return fxshard.trace(model, {"tokens": tokens, "targets": tokens}, F=F, W=W, **options)


def main() -> None:
    """Takes about a minute, most of it for the 96 blocks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    full = gpt(4, 4, 4)
    drawn: dict[str, fxshard.Schedule | fxshard.ScheduleDiff] = {
        "gpt4": full,
        "gpt4_hybrid": gpt(4, 2, 4),
        "gpt4_prefetch": fxshard.diff(gpt(4, 4, 4, forward_prefetch=0, backward_prefetch=0), full),
        "gpt96": gpt(96, 8, 8),
    }
    for name, what in drawn.items():
        path = FOLDER / f"{name}.svg"
        what.render(str(path))
        print(path.relative_to(FOLDER.parent.parent))


if __name__ == "__main__":
    main()
