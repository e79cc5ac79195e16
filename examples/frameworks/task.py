"""What the loops train: a small Llama on made-up text, samples by their number, so that any number of ranks sees the same."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

LENGTH, VOCABULARY = 16, 64


class Counting(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sequences that count up from somewhere: `input_ids` and `labels`, int64 (LENGTH,)."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = (torch.randint(VOCABULARY, (1,), generator=generator) + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def build() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def loader(arguments: argparse.Namespace, rank: int = 0, world_size: int = 1) -> DataLoader[dict[str, Tensor]]:
    """Of each `batch` samples in a row every rank gets its part."""
    data = Counting(arguments.batch * arguments.steps)
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, arguments.batch // world_size, sampler=sampler, collate_fn=default_data_collator)


def arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="batches")
    parser.add_argument("--batch", type=int, default=8, help="samples of all ranks together")
    parser.add_argument("--F", type=int, help="ranks that share one copy of the parameters (default: all of them)")
    parser.add_argument("--save", help="a folder for the trained model, as from_pretrained reads it")
    return parser.parse_args(argv)
