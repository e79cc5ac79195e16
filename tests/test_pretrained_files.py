"""Models of transformers: what `save_pretrained` writes is read here, what is written here `from_pretrained` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, LlamaConfig, PreTrainedModel, T5Config

import fxshard
from fxshard import checkpoint
from tests.distributed.test_checkpoint import unlike
from tests.distributed.test_safetensors import tensors

SMALL = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3}
CONFIGS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", LlamaConfig(**SMALL, num_attention_heads=4, tie_word_embeddings=True)),
    "bert": ("BertForMaskedLM", BertConfig(**SMALL, num_attention_heads=4)),
    "t5": (
        "T5ForConditionalGeneration",
        T5Config(vocab_size=61, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4),
    ),
}


def made(kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    name, config = CONFIGS[kind]
    return getattr(transformers, name)(config).to(dtype)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("most", [None, 15_000], ids=["one-file", "several"])
def test_written_as_transformers_writes(tmp_path: Path, kind: str, most: int | None) -> None:
    """Either reads what the other wrote, bit for bit, and both write the same names."""
    plain = made(kind)
    expected = tensors(plain)
    plain.save_pretrained(tmp_path / "theirs", **({} if most is None else {"max_shard_size": most}))
    model = fxshard.compile(plain, F=3)
    checkpoint.save_safetensors(model, tmp_path / "ours", **({} if most is None else {"max_shard_bytes": most}))
    several = [name for name in files(tmp_path / "ours") if "-of-" in name]
    assert (len(several) > 2) == (most is not None)
    assert ("model.safetensors" in files(tmp_path / "ours")) == (most is None)
    assert {"config.json"} <= set(files(tmp_path / "ours"))
    held: list[dict[str, Tensor]] = []
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        held.append({n: v for path in folder.glob("*.safetensors") for n, v in load_file(path).items()})
        again = type(plain).__mro__[2].from_pretrained(folder)
        assert unlike(expected, tensors(again)) == []
        assert again.config.architectures == [CONFIGS[kind][0]]
        other = fxshard.compile(made(kind, seed=1), F=2)
        assert checkpoint.load_safetensors(other, folder) == ([], [])
        assert unlike(expected, tensors(other)) == []
        if most is not None:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(v.nbytes for v in held[-1].values())
            for name, file in index["weight_map"].items():
                with safe_open(folder / file, "pt") as opened:
                    assert name in opened.keys()  # noqa: SIM118
                    assert opened.metadata() == {"format": "pt"}
    assert unlike(*held) == []
    assert transformers.AutoModel.from_pretrained(tmp_path / "ours").dtype == torch.float32


def test_bf16_stays_bf16_and_is_cast_on_load(tmp_path: Path) -> None:
    plain = made("llama", dtype=torch.bfloat16)
    expected = tensors(plain)
    checkpoint.save_safetensors(fxshard.compile(plain, F=2), tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == torch.bfloat16
    assert unlike(expected, tensors(again)) == []
    wide = fxshard.compile(made("llama", seed=1), F=2)
    checkpoint.load_safetensors(wide, tmp_path)
    assert unlike({n: v.float() for n, v in expected.items()}, tensors(wide)) == []


def test_weights_from_before_are_replaced(tmp_path: Path) -> None:
    model = fxshard.compile(made("llama"), F=2)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model-00001-of-00099.safetensors.incomplete").write_text("of a killed one")
    for most in (15_000, 10**9, 30_000):
        checkpoint.save_safetensors(model, tmp_path, max_shard_bytes=most)
        weights = [n for n in files(tmp_path) if n.startswith("model") and n.endswith("safetensors")]
        assert len(weights) == int(weights[0][-17:-12] if "-of-" in weights[0] else 1)
        assert ("model.safetensors.index.json" in files(tmp_path)) == (len(weights) > 1)
        assert not any("incomplete" in name for name in files(tmp_path))
        assert unlike(tensors(model), tensors(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))) == []
    assert "tokenizer.json" in files(tmp_path)


def test_a_meta_model_is_compiled_then_loaded(tmp_path: Path) -> None:
    expected = made("bert")
    expected.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(CONFIGS["bert"][1])

    def buffers(module: nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            buffer.copy_(expected.get_buffer(next(f"{p}.{name}" for p, m in model.named_modules() if m is module)))

    fxshard.compile(model, F=3, init=buffers)
    checkpoint.load_safetensors(model, tmp_path)
    assert unlike(tensors(expected), tensors(model)) == []
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(model.eval()(input_ids=tokens).logits, expected.eval()(input_ids=tokens).logits)
