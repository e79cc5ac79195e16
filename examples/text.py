"""English text for byte-level language models: the help topics that ship inside every Python.

A token is a byte, so the vocabulary is 256 and there is nothing to download.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor


def split(validation: float = 0.1) -> tuple[Tensor, Tensor]:
    """All topics joined, as uint8 tensors: the text to train on, and its last part to validate on."""
    joined = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = torch.frombuffer(bytearray(joined, "utf-8"), dtype=torch.uint8)
    cut = int(len(tokens) * (1 - validation))
    return tokens[:cut], tokens[cut:]


def sample(text: Tensor, batch: int, length: int, seed: int) -> dict[str, Tensor]:
    """`tokens` and `targets`, int64 (batch, length): windows of the text, and the same one byte later."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (batch,), generator=generator)
    windows = text[starts[:, None] + torch.arange(length + 1)].long()
    return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
