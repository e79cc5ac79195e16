"""The models that every command and benchmark takes by name.

`get("gpt_demo")` gives two functions: one builds the model, the other its example inputs. For all of them
`model(**inputs)` is the loss (0-d), and without `targets` it is the model's output. A model built with
`device="meta"` allocates nothing; `model.to_empty(device=...)` and `initialize(model)` then give the same values as
building it on that device from the same seed.

Shapes: B batch, T tokens, W width, V vocabulary, H heads, D = W / H.
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Device = torch.device | str | None


def initialize(model: nn.Module) -> None:
    """Draw all parameters anew and refill all buffers, each by the `reset_parameters` of the module that owns it.

    Modules are visited in the order in which they were built, so a seed gives the same values here as there.
    """
    for module in model.modules():
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss (0-d) of logits (..., classes) for int64 targets (...), in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


# ---- parts -----------------------------------------------------------------------------------------------------------


class NormalLinear(nn.Linear):
    """A Linear whose weight starts normal with deviation `std`, and whose bias starts at zero."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        std: float = 0.02,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.std = std  # before super(), which calls reset_parameters
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """An Embedding whose rows start normal with deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class FeedForward(nn.Module):
    """Linear to 4 W, GELU, Linear back to W."""

    def __init__(
        self,
        width: int,
        residual_std: float = 0.02,
        dropout: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.expand = NormalLinear(width, 4 * width, device=device, dtype=dtype)
        self.project = NormalLinear(4 * width, width, std=residual_std, device=device, dtype=dtype)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.project(F.gelu(self.expand(x))))
        return y


# ---- decoder-only GPT ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT."""

    layers: int
    """Number of blocks."""
    width: int
    """W, the size of the residual stream; a multiple of `heads`."""
    heads: int
    """H, the number of attention heads."""
    vocabulary: int
    """V, the number of different tokens."""
    length: int
    """The longest sequence, and the number of learned positions."""
    dropout: float = 0.0
    """Probability of dropout after the embeddings, on the attention weights and at the end of each residual branch."""
    tied: bool = False
    """The token embedding and the head share their weight: one parameter under two names."""
    explicit_attention: bool = False
    """Attention by softmax of the whole (T, T) scores and a mask buffer, instead of the fused operator."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"GPTConfig.{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"GPTConfig.width must be a multiple of heads, got width={self.width}, heads={self.heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"GPTConfig.dropout must be in [0, 1), got {self.dropout}")

    @property
    def residual_std(self) -> float:
        """Deviation of the projections that add to the residual stream, two a block. Source: GPT-2, section 2.3."""
        return 0.02 / math.sqrt(2 * self.layers)


class CausalAttention(nn.Module):
    """Self-attention in which a token sees itself and the tokens before it: (B, T, W) -> (B, T, W)."""

    future: Tensor
    """Only with explicit attention: bool (length, length), True where the key comes after the query."""

    def __init__(self, config: GPTConfig, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.explicit = config.explicit_attention
        self.qkv = NormalLinear(config.width, 3 * config.width, device=device, dtype=dtype)
        self.project = NormalLinear(config.width, config.width, std=config.residual_std, device=device, dtype=dtype)
        self.residual_dropout = nn.Dropout(config.dropout)
        if self.explicit:
            future = torch.empty(config.length, config.length, dtype=torch.bool, device=device)
            self.register_buffer("future", future, persistent=False)
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Refill the mask; the parameters belong to the two Linears."""
        if self.explicit:
            self.future.fill_(True).triu_(1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, D)
        dropout = self.dropout if self.training else 0.0
        if self.explicit:
            scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
            scores = scores.masked_fill(self.future[:length, :length], float("-inf"))
            mixed = F.dropout(scores.softmax(dim=-1), dropout) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y: Tensor = self.residual_dropout(self.project(mixed.transpose(1, 2).flatten(2)))
        return y


class Block(nn.Module):
    """Attention and feed-forward, each on a normalized copy of the residual stream it adds to."""

    def __init__(self, config: GPTConfig, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, device=device, dtype=dtype)
        self.attention = CausalAttention(config, device=device, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(config.width, device=device, dtype=dtype)
        self.mlp = FeedForward(config.width, config.residual_std, config.dropout, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class GPT(nn.Module):
    """Decoder-only Transformer with pre-norm blocks and learned positions.

    Parameters, untied: `layers * (12 * W**2 + 13 * W) + 2 * V * W + length * W + 2 * W`; tied: `V * W` fewer.
    """

    def __init__(self, config: GPTConfig, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = NormalEmbedding(config.vocabulary, config.width, device=device, dtype=dtype)
        self.position_embedding = NormalEmbedding(config.length, config.width, device=device, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, device=device, dtype=dtype) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, device=device, dtype=dtype)
        self.head = NormalLinear(config.width, config.vocabulary, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Tie the embedding to the head, also after `to_empty`, which unties them when it leaves the meta device.

        The head's weight is the one that stays because it is drawn last, when built as by `initialize`.
        """
        if self.config.tied:
            self.token_embedding.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Give the mean loss (0-d) if there are targets, else the logits (B, T, V).

        tokens, targets: int64 (B, T), T at most `config.length`.
        Raises ValueError for a longer sequence.
        """
        length = tokens.shape[1]
        if length > self.config.length:
            raise ValueError(f"tokens must be at most {self.config.length} long (GPTConfig.length), got {length}")
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else cross_entropy(logits, targets)


# ---- residual convolutional network ----------------------------------------------------------------------------------


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut: (B, in, h, w) -> (B, out, h / stride, w / stride)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int = 1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False, device=device, dtype=dtype)
        self.norm1 = nn.BatchNorm2d(out_channels, device=device, dtype=dtype)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False, device=device, dtype=dtype)
        self.norm2 = nn.BatchNorm2d(out_channels, device=device, dtype=dtype)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Image classifier with running statistics, that is, with buffers which training changes.

    `channels` gives the stem's width and then one stage, of one residual block, for each further entry; a stage that
    changes the width halves the image.
    """

    def __init__(
        self,
        channels: Sequence[int],
        classes: int = 10,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1, bias=False, device=device, dtype=dtype)
        self.norm = nn.BatchNorm2d(channels[0], device=device, dtype=dtype)
        self.stages = nn.ModuleList(
            ResidualBlock(before, after, 1 if before == after else 2, device=device, dtype=dtype)
            for before, after in pairwise(channels)
        )
        self.head = nn.Linear(channels[-1], classes, device=device, dtype=dtype)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Tensor:
        """Give the mean loss (0-d) if there are targets, else the logits (B, classes).

        images: floating point (B, 3, h, w), taken in the model's own dtype. targets: int64 (B,).
        """
        x = F.relu(self.norm(self.stem(images.to(self.stem.weight.dtype))))
        for stage in self.stages:
            x = stage(x)
        logits = self.head(x.mean(dim=(2, 3)))
        return logits if targets is None else cross_entropy(logits, targets)


# ---- encoder-decoder Transformer -------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of x (B, T, W) to a memory (B, S, W), which is x itself for self-attention: -> (B, T, W)."""

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = NormalLinear(width, width, device=device, dtype=dtype)
        self.key = NormalLinear(width, width, device=device, dtype=dtype)
        self.value = NormalLinear(width, width, device=device, dtype=dtype)
        self.project = NormalLinear(width, width, device=device, dtype=dtype)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D)
        key = self.key(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, S, D)
        value = self.value(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        y: Tensor = self.project(mixed.transpose(1, 2).flatten(2))
        return y


class EncoderBlock(nn.Module):
    """Self-attention over the whole source, and feed-forward."""

    def __init__(self, width: int, heads: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.attention = Attention(width, heads, device=device, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.mlp = FeedForward(width, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output, and feed-forward."""

    def __init__(self, width: int, heads: int, device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.attention = Attention(width, heads, causal=True, device=device, dtype=dtype)
        self.cross_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.cross = Attention(width, heads, device=device, dtype=dtype)
        self.mlp_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.mlp = FeedForward(width, device=device, dtype=dtype)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        x = x + self.cross(self.cross_norm(x), memory)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class EncoderDecoder(nn.Module):
    """Sequence-to-sequence Transformer: embeddings used by both sides, and a memory that every decoder block reads."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        length: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.token_embedding = NormalEmbedding(vocabulary, width, device=device, dtype=dtype)
        self.position_embedding = NormalEmbedding(length, width, device=device, dtype=dtype)
        self.encoder = nn.ModuleList(EncoderBlock(width, heads, device=device, dtype=dtype) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.decoder = nn.ModuleList(DecoderBlock(width, heads, device=device, dtype=dtype) for _ in range(layers))
        self.decoder_norm = nn.LayerNorm(width, device=device, dtype=dtype)
        self.head = NormalLinear(width, vocabulary, bias=False, device=device, dtype=dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Give (B, T, W) for int64 tokens (B, T)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.token_embedding(tokens) + self.position_embedding(positions)
        return x

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Give the mean loss (0-d) if there are targets, else the logits (B, T, V).

        source: int64 (B, S), what the encoder reads. tokens, targets: int64 (B, T), the decoder's input and output.
        """
        memory = self.embed(source)
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        x = self.embed(tokens)
        for block in self.decoder:
            x = block(x, memory)
        logits = self.head(self.decoder_norm(x))
        return logits if targets is None else cross_entropy(logits, targets)


# ---- perceptron of odd sizes -----------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Linears with Tanh between them and a LayerNorm, whose weight starts at one, after the last.

    With odd sizes no parameter divides evenly among ranks; with a size of 1 some ranks hold padding only.
    """

    def __init__(self, sizes: Sequence[int], device: Device = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(before, after, device=device, dtype=dtype) for before, after in pairwise(sizes)
        )
        self.activation = nn.Tanh()
        self.norm = nn.LayerNorm(sizes[-1], device=device, dtype=dtype)

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        """Give the mean squared error (0-d) if there are targets, else the output (B, sizes[-1]).

        features: floating point (B, sizes[0]). targets: (B, sizes[-1]). Both are taken in the model's own dtype.
        """
        x = features.to(self.norm.weight.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == 0 else layer(self.activation(x))
        output = self.norm(x)
        return output if targets is None else F.mse_loss(output, targets.to(output.dtype))


# ---- example inputs --------------------------------------------------------------------------------------------------


def _place(device: Device, generator: torch.Generator | None) -> Device:
    """Say where to draw: where the generator lives, so that one seed gives the same inputs on every device."""
    if generator is None or (device is not None and torch.device(device).type == "meta"):
        return device
    return generator.device


def _integers(high: int, shape: tuple[int, ...], device: Device, generator: torch.Generator | None) -> Tensor:
    place = _place(device, generator)
    return torch.randint(high, shape, generator=generator, device=place).to(device or place)


def _normals(shape: tuple[int, ...], device: Device, generator: torch.Generator | None) -> Tensor:
    place = _place(device, generator)
    return torch.randn(shape, generator=generator, device=place).to(device or place)


def _next_tokens(
    vocabulary: int, batch: int, length: int, device: Device, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Random tokens (B, T), and as targets (B, T) the token after each."""
    text = _integers(vocabulary, (batch, length + 1), device, generator)
    return {"tokens": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}


def _gpt_inputs(config: GPTConfig, batch: int, device: Device, generator: torch.Generator | None) -> dict[str, Tensor]:
    return _next_tokens(config.vocabulary, batch, config.length, device, generator)


# ---- models by name --------------------------------------------------------------------------------------------------

GPT_DEMO = GPTConfig(layers=6, width=256, heads=8, vocabulary=256, length=128)
GPT_512X6 = GPTConfig(layers=6, width=512, heads=8, vocabulary=8192, length=256)
GPT_768X12 = GPTConfig(layers=12, width=768, heads=12, vocabulary=50257, length=256)
GPT_1B = GPTConfig(layers=24, width=2048, heads=16, vocabulary=50304, length=2048)
GPT_175B = GPTConfig(layers=96, width=12288, heads=96, vocabulary=50000, length=2048, explicit_attention=True)


def gpt_demo(device: Device = None, dtype: torch.dtype | None = None) -> GPT:
    """Byte-level GPT of 4,902,912 parameters: a step of batch 8 takes a third of a second on one CPU core."""
    return GPT(GPT_DEMO, device=device, dtype=dtype)


def gpt_demo_inputs(
    batch: int = 8, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`tokens` and `targets`, int64 (B, 128)."""
    return _gpt_inputs(GPT_DEMO, batch, device, generator)


def gpt_512x6(device: Device = None, dtype: torch.dtype | None = None) -> GPT:
    """GPT of 27,435,008 parameters: 6 blocks of width 512."""
    return GPT(GPT_512X6, device=device, dtype=dtype)


def gpt_512x6_inputs(
    batch: int = 8, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`tokens` and `targets`, int64 (B, 256)."""
    return _gpt_inputs(GPT_512X6, batch, device, generator)


def gpt_768x12(device: Device = None, dtype: torch.dtype | None = None) -> GPT:
    """GPT of 162,447,360 parameters: 12 blocks of width 768, the shape of GPT-2's smallest with an untied head."""
    return GPT(GPT_768X12, device=device, dtype=dtype)


def gpt_768x12_inputs(
    batch: int = 8, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`tokens` and `targets`, int64 (B, 256)."""
    return _gpt_inputs(GPT_768X12, batch, device, generator)


def gpt_1b(device: Device = None, dtype: torch.dtype | None = None) -> GPT:
    """GPT of 1,418,842,112 parameters: 24 blocks of width 2048.

    The blocks alone have 1,208,598,528; a tied head would leave 1,315,819,520 in all.
    """
    return GPT(GPT_1B, device=device, dtype=dtype)


def gpt_1b_inputs(batch: int = 4, device: Device = None, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """`tokens` and `targets`, int64 (B, 2048)."""
    return _gpt_inputs(GPT_1B, batch, device, generator)


def gpt_175b(device: Device = None, dtype: torch.dtype | None = None) -> GPT:
    """GPT of 175,215,501,312 parameters: 96 blocks of width 12288 with explicit attention; build it on the meta device.

    Source: the minGPT of the FSDP paper's evaluation (vocabulary 50000, length 2048).
    """
    return GPT(GPT_175B, device=device, dtype=dtype)


def gpt_175b_inputs(
    batch: int = 1, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`tokens` and `targets`, int64 (B, 2048)."""
    return _gpt_inputs(GPT_175B, batch, device, generator)


def resnet_small(device: Device = None, dtype: torch.dtype | None = None) -> ResNet:
    """ResNet of 175,066 parameters: six stages of widths 16, 16, 32, 32, 64, 64 and ten classes."""
    return ResNet((16, 16, 16, 32, 32, 64, 64), classes=10, device=device, dtype=dtype)


def resnet_small_inputs(
    batch: int = 8, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`images`, float (B, 3, 32, 32), and `targets`, int64 (B,)."""
    return {
        "images": _normals((batch, 3, 32, 32), device, generator),
        "targets": _integers(10, (batch,), device, generator),
    }


def encoder_decoder_small(device: Device = None, dtype: torch.dtype | None = None) -> EncoderDecoder:
    """EncoderDecoder of 1,524,224 parameters: three blocks a side, width 128."""
    return EncoderDecoder(layers=3, width=128, heads=4, vocabulary=512, length=32, device=device, dtype=dtype)


def encoder_decoder_small_inputs(
    batch: int = 8, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`source`, int64 (B, 32), and `tokens` and `targets`, int64 (B, 24)."""
    source = _integers(512, (batch, 32), device, generator)
    return {"source": source, **_next_tokens(512, batch, 24, device, generator)}


def mlp_odd(device: Device = None, dtype: torch.dtype | None = None) -> MLP:
    """MLP of 74 parameters: sizes 7, 5, 1, 7."""
    return MLP((7, 5, 1, 7), device=device, dtype=dtype)


def mlp_odd_inputs(
    batch: int = 8, device: Device = None, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """`features` and `targets`, float (B, 7)."""
    return {"features": _normals((batch, 7), device, generator), "targets": _normals((batch, 7), device, generator)}


class ModelFactory(Protocol):
    """Builds a model on a device, in a dtype; on the meta device it allocates nothing."""

    def __call__(self, device: Device = None, dtype: torch.dtype | None = None) -> nn.Module: ...


class InputsFactory(Protocol):
    """Draws the keyword arguments of the model's forward; the default batch differs from model to model."""

    def __call__(
        self, batch: int = ..., device: Device = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]: ...


MODELS: dict[str, tuple[ModelFactory, InputsFactory]] = {
    "gpt_demo": (gpt_demo, gpt_demo_inputs),
    "gpt_512x6": (gpt_512x6, gpt_512x6_inputs),
    "gpt_768x12": (gpt_768x12, gpt_768x12_inputs),
    "gpt_1b": (gpt_1b, gpt_1b_inputs),
    "gpt_175b": (gpt_175b, gpt_175b_inputs),
    "resnet_small": (resnet_small, resnet_small_inputs),
    "encoder_decoder_small": (encoder_decoder_small, encoder_decoder_small_inputs),
    "mlp_odd": (mlp_odd, mlp_odd_inputs),
}


def get(name: str) -> tuple[ModelFactory, InputsFactory]:
    """Give the model's factory and its inputs' factory. Raises ValueError for a name that is not in MODELS."""
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown model {name!r}{hint} (allowed: {', '.join(MODELS)})")
