"""Models of transformers by a configuration: which class, which inputs, and the schedule of its training step."""

import json

import pytest
import torch
import transformers

from fxshard.cli import hugging_face, main
from fxshard.cli.syntax import UsageError

WIDTH = "hidden_size=32, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2"
TEXT = f"{WIDTH}, vocab_size=99, max_position_embeddings=64"
MODELS = {
    f"LlamaConfig{{{TEXT}, num_key_value_heads=2}}": ("LlamaForCausalLM", "model.layers"),
    f"Qwen2Config{{{TEXT}, num_key_value_heads=2}}": ("Qwen2ForCausalLM", "model.layers"),
    f"MixtralConfig{{{TEXT}, num_key_value_heads=2, num_local_experts=4}}": ("MixtralForCausalLM", "model.layers"),
    "GPT2Config{n_embd=32, n_head=4, n_layer=2, vocab_size=99, n_positions=64}": ("GPT2LMHeadModel", "transformer.h"),
    f"BertConfig{{{TEXT}}}": ("BertForMaskedLM", "bert.encoder.layer"),
    "T5Config{d_model=32, d_kv=8, num_heads=4, d_ff=64, num_layers=2, vocab_size=99}": (
        "T5ForConditionalGeneration",
        "decoder.block",
    ),
    f"ViTConfig{{{WIDTH}, image_size=[16, 32], patch_size=8}}": ("ViTForImageClassification", "vit.layers"),
    "WhisperConfig{d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, "
    "encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, pad_token_id=0, max_source_positions=50}": (
        "WhisperForConditionalGeneration",
        "model.decoder.layers",
    ),
    "ResNetConfig{embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type=basic}": (
        "ResNetForImageClassification",
        "resnet.encoder.stages",
    ),
}
LLAMA = next(iter(MODELS))


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def model(text: str):
    with torch.device("meta"):
        return hugging_face.model(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            text, expected, marks=pytest.mark.full if text.startswith(("T5", "Whisper", "GPT2", "Qwen2")) else ()
        )
        for text, expected in MODELS.items()
    ],
    ids=lambda x: x.split("{")[0] if isinstance(x, str) else "",
)
def test_a_training_step_with_its_loss(text, expected, capsys):
    class_name, blocks = expected
    found = model(text)
    assert type(found).__name__ == class_name
    assert all(p.device.type == "meta" for p in found.parameters())
    assert not getattr(found.config, "use_cache", False)
    assert "labels" in hugging_face.inputs(found, {})
    assert main(["show", f"hf:{text}", "--F", "2", "--batch", "2"]) == 0
    forward, backward = capsys.readouterr().out.split("\nbackward\n")
    for block in (f"{blocks}.0", f"{blocks}.1"):
        assert f"  AG     {block} " in forward and f"  RS     {block} " in backward


def test_a_path_of_a_configuration_and_of_its_folder(tmp_path, capsys):
    found = model(LLAMA)
    found.config.save_pretrained(tmp_path)
    texts = []
    for target in (f"hf:{LLAMA}", f"hf:{tmp_path}", str(tmp_path), str(tmp_path / "config.json")):
        assert main(["show", target, "--F", "2", "--length", "16"]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    fewer = model(f"{tmp_path}{{num_hidden_layers=1}}")
    assert len(fewer.model.layers) == 1


def test_the_class_is_the_one_that_the_configuration_asks_for(tmp_path):
    bert = next(text for text in MODELS if text.startswith("Bert"))
    asked = bert.replace("{", "{architectures=['BertForSequenceClassification'], ")
    found = model(asked)
    assert type(found).__name__ == "BertForSequenceClassification"
    assert hugging_face.inputs(found, {"batch": 3})["labels"].shape == (3,)


def test_a_configuration_that_no_task_knows_gives_the_bare_model():
    text = "CLIPVisionConfig{hidden_size=32, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2}"
    found = model(text)
    assert isinstance(found, transformers.PreTrainedModel)


def test_sizes_of_inputs():
    found = model(LLAMA)
    for sizes, shape in (({}, (1, 64)), ({"batch": 3}, (3, 64)), ({"batch": 2, "length": 7}, (2, 7))):
        made = hugging_face.inputs(found, sizes)
        assert {name: tuple(x.shape) for name, x in made.items()} == {"input_ids": shape, "labels": shape}
    with pytest.raises(UsageError, match="--length 65: the model has 64 positions"):
        hugging_face.inputs(found, {"length": 65})
    vit = model(next(text for text in MODELS if text.startswith("ViT")).replace("{", "{dtype=bfloat16, "))
    assert hugging_face.inputs(vit, {})["pixel_values"].dtype == torch.bfloat16
    assert hugging_face.inputs(vit, {"batch": 3})["pixel_values"].shape == (3, 3, 16, 32)
    with pytest.raises(UsageError, match="ViTForImageClassification takes images: leave out --length"):
        hugging_face.inputs(vit, {"length": 3})


def test_inputs_of_ones_own(capsys):
    assert main(["show", f"hf:{LLAMA}", "--F", "2", "--inputs", "tests.cli.test_hugging_face:own_inputs"]) == 0
    assert "model.layers.1" in capsys.readouterr().out


def own_inputs():
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "hf:no-such-model",
            "no configuration of 'no-such-model' could be had, from the hub or its local cache; give the",
        ),
        ("hf:LlammaConfig", "transformers has no 'LlammaConfig'; did you mean 'LlamaConfig'?"),
        ("hf:LlamaConfig{vocab_size=many}", "hf:LlamaConfig{vocab_size=many}: "),
        (
            "hf:LlamaConfig{hidden_size=30, num_attention_heads=7}",
            "hf:LlamaConfig{hidden_size=30, num_attention_heads=7}",
        ),
        ("hf:no/such/config.json", "there is no file 'no/such/config.json'"),
        ("no/such/config.json", "there is no file 'no/such/config.json'"),
        (
            "hf:Wav2Vec2Config{hidden_size=32, num_attention_heads=4, intermediate_size=64, num_hidden_layers=2}",
            "no example inputs are known for Wav2Vec2",
        ),
    ],
)
def test_errors_are_one_line_with_a_way_out(target, expected, capsys):
    assert main(["show", target, "--F", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fxshard: error: {expected}")


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    path = tmp_path / "config.json"
    for text in ("", json.dumps({"a": 1}), json.dumps({"model_type": "no-such-type"})):
        path.write_text(text)
        assert main(["show", str(path), "--F", "2"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"fxshard: error: '{path}' is not the configuration of a model of transformers: ")


def test_a_misspelt_field_is_told(capsys):
    assert main(["show", "hf:LlamaConfig{num_hidden_layer=2}", "--F", "2"]) == 2
    error = capsys.readouterr().err
    assert "LlamaConfig has no 'num_hidden_layer'" in error and "num_hidden_layers" in error
