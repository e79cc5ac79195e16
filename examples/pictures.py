"""The pictures of the docs, from schedules traced without devices: `make pictures`."""

from __future__ import annotations

from pathlib import Path

import torch

import fxshard
from examples.models import GPT, GPTConfig

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def gpt(layers: int, F: int, W: int) -> fxshard.Schedule:
    """The schedule of a GPT's training step; the model has no memory."""
    config = GPTConfig(layers=layers, width=512, heads=8, vocabulary=8192, length=256)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(8, config.length, dtype=torch.int64)
    return fxshard.trace(model, {"tokens": tokens, "targets": tokens}, F=F, W=W)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, layers, F, W in (("gpt4", 4, 4, 4), ("gpt4_hybrid", 4, 2, 4)):
        path = FOLDER / f"{name}.svg"
        gpt(layers, F, W).render(str(path))
        print(path.relative_to(FOLDER.parent.parent))


if __name__ == "__main__":
    main()
