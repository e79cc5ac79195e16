"""The models whose training is compared, each tiny, with random weights.

Inputs differ from rank to rank and from step to step; where batches are ragged, the last one of an epoch of five steps
is smaller, by an amount that depends on the rank, which some models follow. B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from examples.models import GPT, MLP, GPTConfig
from tests.horror.model import SYMBOLS, TOKENS, Horror

EPOCH = 5
"""Steps until the batch that may be smaller."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """Which batch: of a step, of a rank; `short` if it is a ragged one."""

    step: int
    rank: int
    short: bool

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(10_000 + 100 * self.step + self.rank)

    def samples(self) -> int:
        """Four, or fewer in a short batch, not the same number on all ranks."""
        return 3 - self.rank % 2 if self.short else 4


def default_loss(output: Any, step: int, rank: int) -> Tensor:
    """The output itself, or the `loss` of a transformers output."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


@dataclass(frozen=True)
class Subject:
    """A model under test.

    `build(dropout)` draws it from the global generator; those without dropout ignore the probability. `inputs(draw)` are
    arguments of forward.
    """

    build: Callable[[float], nn.Module]
    inputs: Callable[[Draw], Inputs]
    loss: Callable[[Any, int, int], Tensor] = default_loss
    options: Mapping[str, Any] = field(default_factory=dict)
    """For `fxshard.compile`."""

    def batch(self, step: int, rank: int, dtype: torch.dtype, ragged: bool) -> Inputs:
        """The inputs with floating tensors in `dtype`."""
        draw = Draw(step, rank, ragged and step % EPOCH == EPOCH - 1)
        return {
            name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in self.inputs(draw).items()
        }


# ---- perceptrons -----------------------------------------------------------------------------------------------------


class SpareMLP(MLP):
    """Sizes 7, 5, 1, 7, a norm that starts at one, and a Linear that nothing uses: it never gets a gradient."""

    def __init__(self, dropout: float) -> None:
        super().__init__((7, 5, 1, 7))
        self.spare = nn.Linear(5, 1)


class TwoHeads(nn.Module):
    """Gives two outputs (B, 5) and (B, 1); a loss may leave one out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 5)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(features))
        return self.first(x), self.second(x)


def two_heads_loss(output: Any, step: int, rank: int) -> Tensor:
    """The second head counts on rank 0 alone in odd steps, on no rank in every fourth step, else on all."""
    first, second = output
    loss: Tensor = first.square().mean()
    if step % 4 == 0 or (step % 2 and rank):
        return loss
    return loss + second.square().mean()


def features(draw: Draw) -> Inputs:
    return {"features": torch.randn(draw.samples(), 7, generator=draw.generator())}


def features_and_targets(draw: Draw) -> Inputs:
    generator = draw.generator()
    shape = (draw.samples(), 7)
    return {"features": torch.randn(shape, generator=generator), "targets": torch.randn(shape, generator=generator)}


# ---- language models -------------------------------------------------------------------------------------------------

VOCABULARY = 61
STARTS_WITH: dict[str, Any] = {"decoder_start_token_id": 0}


def gpt(dropout: float) -> nn.Module:
    return GPT(GPTConfig(layers=2, width=32, heads=4, vocabulary=VOCABULARY, length=16, dropout=dropout, tied=True))


def gpt_inputs(draw: Draw) -> Inputs:
    """Sequences are shorter in the last batch too."""
    length = 9 if draw.short else 12
    shape = (draw.samples(), length + 1)
    text = torch.randint(VOCABULARY, shape, generator=draw.generator())
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def causal_inputs(draw: Draw) -> Inputs:
    text = torch.randint(VOCABULARY, (2, 10), generator=draw.generator())
    return {"input_ids": text, "labels": text}


def llama(dropout: float) -> nn.Module:
    """Four query heads on two key heads, tied head, attention dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout, tie_word_embeddings=True,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mixtral(dropout: float, experts: str = "batched_mm") -> nn.Module:
    """Four experts, two of them for each token. Router logits off: their loss is not captured whole.

    `experts` is how transformers multiplies them: "batched_mm" knows float64; "grouped_mm", its default, does not, and
    is another operator when captured than in eager.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout, num_local_experts=4,
        output_router_logits=False, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def mamba(dropout: float) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False)
    return MambaForCausalLM(config)


def t5(dropout: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=dropout,
        use_cache=False, pad_token_id=0, eos_token_id=1, **STARTS_WITH,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def t5_inputs(draw: Draw) -> Inputs:
    generator = draw.generator()
    return {
        "input_ids": torch.randint(2, VOCABULARY, (2, 8), generator=generator),
        "labels": torch.randint(2, VOCABULARY, (2, 6), generator=generator),
    }


def bert(dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForMaskedLM(config)


# ---- sound and images ------------------------------------------------------------------------------------------------


def whisper(dropout: float) -> nn.Module:
    """Encoder-decoder with frozen positions. Layers are not dropped: which are is decided by data."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=10, max_target_positions=16, dropout=dropout, attention_dropout=dropout, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def whisper_inputs(draw: Draw) -> Inputs:
    generator = draw.generator()
    return {
        "input_features": torch.randn(2, 8, 20, generator=generator),
        "labels": torch.randint(4, VOCABULARY, (2, 6), generator=generator),
    }


LABELS: dict[str, Any] = {"num_labels": 5}


def vit(dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=8,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **LABELS,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet(dropout: float) -> nn.Module:
    """BatchNorm everywhere: buffers of each rank's own."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", **LABELS,
    )  # fmt: skip
    return ResNetForImageClassification(config)


class WideBatchNorm(nn.BatchNorm2d):
    """Computes in the dtype of its statistics. torch has no CPU batch norm of 16-bit weights and fp32 statistics."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.momentum is not None
        self.num_batches_tracked.add_(1)
        wide = [t.to(self.running_mean.dtype) for t in (x, self.weight, self.bias)]
        y = nn.functional.batch_norm(
            wide[0], self.running_mean, self.running_var, wide[1], wide[2], True, self.momentum
        )
        return y.to(x.dtype)


def resnet_wide(dropout: float) -> nn.Module:
    model = resnet(dropout)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = WideBatchNorm
    return model


def image_inputs(draw: Draw) -> Inputs:
    generator = draw.generator()
    return {
        "pixel_values": torch.randn(3, 3, 16, 16, generator=generator),
        "labels": torch.randint(5, (3,), generator=generator),
    }


def horror(dropout: float, wide: bool = False) -> nn.Module:
    """Its own dropout keeps its bits in every dtype, so it stays."""
    model = Horror()
    if wide:
        model.batch_norm.__class__ = WideBatchNorm
    return model


def horror_inputs(draw: Draw) -> Inputs:
    """Each block's extra branch is taken by every third batch."""
    generator = draw.generator()
    return {
        "tokens": torch.randint(SYMBOLS, (draw.samples(), TOKENS), generator=generator),
        "image": torch.randn(draw.samples(), 3, 4, 4, generator=generator),
        "extra": draw.step % 3 == 1,
    }


def horror_loss(output: Any, step: int, rank: int) -> Tensor:
    """In float32 or wider. The score counts on rank 0 alone in odd batches, on no rank in every fourth, else on all."""
    wide = torch.promote_types(output.logits.dtype, torch.float32)
    loss: Tensor = (output.logits / 4).to(wide).logsumexp(-1).mean()
    if step % 4 == 0 or (step % 2 and rank):
        return loss
    return loss + output.score.to(wide).square().mean() / output.depth


SUBJECTS: dict[str, Subject] = {
    "horror": Subject(horror, horror_inputs, horror_loss, options={"debug": True}),
    "horror_offloaded": Subject(horror, horror_inputs, horror_loss, options={"debug": True, "cpu_offload": True}),
    "horror_wide": Subject(partial(horror, wide=True), horror_inputs, horror_loss, options={"debug": True}),
    "mlp": Subject(SpareMLP, features_and_targets, options={"units": nn.Linear}),
    "two_heads": Subject(TwoHeads, features, two_heads_loss, options={"units": nn.Linear}),
    "gpt": Subject(gpt, gpt_inputs),
    "llama": Subject(llama, causal_inputs),
    "mixtral": Subject(mixtral, causal_inputs),
    "mixtral_grouped": Subject(partial(mixtral, experts="grouped_mm"), causal_inputs),
    "whisper": Subject(whisper, whisper_inputs),
    "resnet": Subject(resnet, image_inputs),
    "resnet_wide": Subject(resnet_wide, image_inputs),
    "t5": Subject(t5, t5_inputs),
    "bert": Subject(bert, causal_inputs),
    "mamba": Subject(mamba, causal_inputs),
    "vit": Subject(vit, image_inputs),
}
