"""Models of transformers from a configuration, and training inputs that fit them; no weights are read."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxshard.cli.syntax import UsageError, call, close, first_line

TASKS = (
    ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
    ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"),
)
"""What a model is trained for, the first that there is: an encoder also has a causal form, which nobody trains."""

LENGTH = 512
"""Tokens of a sequence, unless asked otherwise or the model has fewer positions."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""What configurations call the most tokens of a sequence."""

IMAGE_SIZE = 224
"""Pixels of an image's side where the model takes any."""


def model(text: str) -> nn.Module:
    """The model of a configuration, on the current device, for training: without a cache of keys and values.

    text: `LlamaConfig{hidden_size=512}`, a path to a `config.json` or its folder, or a name on the hub; arguments in
    braces replace what the configuration says. Its class is the one the configuration asks for, else by TASKS, else the
    bare model. Raises UsageError.
    """
    transformers = _transformers()
    config = _config(transformers, text)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    try:
        return _auto_class(transformers, config).from_config(config)
    except Exception as error:
        raise UsageError(
            f"no model could be made of hf:{text}: {first_line(error)} (--debug shows the traceback)"
        ) from error


def inputs(model: Any, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Keyword arguments of a training step, on the current device, with labels where forward takes them.

    B = sizes['batch'] (1), T = sizes['length'] (512, or as many positions as there are). Of a text model `input_ids` and
    `labels`, int64 (B, T), or (B,) where a sequence has one label; of an image model `pixel_values` (B, C, h, w) and
    `labels` (B,); of a speech model `input_features` (B, mel bins, frames) and `labels` (B, T). Raises UsageError for
    other models.
    """
    config, main = model.config, model.main_input_name
    batch, length = sizes.get("batch", 1), sizes.get("length")
    main_shape: tuple[int, ...]
    labels_shape: tuple[int, ...]
    if main == "pixel_values":
        if length is not None:
            raise UsageError(f"{type(model).__name__} takes images: leave out --length")
        size = getattr(config, "image_size", IMAGE_SIZE)
        height, width = (size, size) if isinstance(size, int) else size
        main_shape, labels_shape = (batch, getattr(config, "num_channels", 3), height, width), (batch,)
    elif main == "input_ids":
        main_shape = (batch, _length(config, length))
        labels_shape = (batch,) if type(model).__name__.endswith("ForSequenceClassification") else main_shape
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        main_shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)  # a convolution halves it
        labels_shape = (batch, _length(config, length))
    else:
        raise UsageError(
            f"no example inputs are known for {type(model).__name__} ({main}): give --inputs MODULE:FUNCTION"
        )
    dtype = torch.int64 if main == "input_ids" else model.dtype
    made = {main: torch.zeros(main_shape, dtype=dtype)}
    if "labels" in inspect.signature(model.forward).parameters:
        made["labels"] = torch.zeros(labels_shape, dtype=torch.int64)
    return made


def _length(config: Any, asked: int | None) -> int:
    text = config.get_text_config(decoder=True)
    positions = next((n for n in (getattr(text, name, None) for name in POSITIONS) if n), None)
    if asked is not None and positions is not None and asked > positions:
        raise UsageError(f"--length {asked}: the model has {positions} positions")
    return asked if asked is not None else min(LENGTH, positions or LENGTH)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UsageError("hf: needs transformers, which is not installed: pip install transformers") from None
    return transformers


def _config(transformers: Any, text: str) -> Any:
    name, arguments = call(text)
    if name.endswith("Config"):
        made = getattr(transformers, name, None)
        if made is None:
            there = [n for n in dir(transformers) if n.endswith("Config")]
            raise UsageError(f"transformers has no {name!r}{close(name, there)}")
        standard = made()
        for given in arguments or {}:
            if not hasattr(standard, given):  # transformers takes any word and keeps it to itself
                raise UsageError(f"{name} has no {given!r}{close(given, dir(standard))}")
        try:
            return made(**(arguments or {}))
        except Exception as error:
            raise UsageError(f"hf:{text}: {first_line(error)}") from error
    path = os.path.join(name, "config.json") if os.path.isdir(name) else name
    if path.endswith(".json") and not os.path.isfile(path):
        raise UsageError(f"there is no file {path!r}")
    try:
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, **(arguments or {}))
    except Exception as error:
        if os.path.isfile(path):
            raise UsageError(
                f"{path!r} is not the configuration of a model of transformers: {first_line(error)}"
            ) from error
        raise UsageError(
            f"no configuration of {name!r} could be had, from the hub or its local cache; give the path of a config.json, or "
            f"a class such as 'hf:LlamaConfig{{num_hidden_layers=4}}' ({first_line(error)})"
        ) from error


def _auto_class(transformers: Any, config: Any) -> Any:
    """The Auto class that builds the model; raises nothing, as every configuration has a bare model."""
    wanted = getattr(config, "architectures", None) or []
    found = []
    for auto, mapping in TASKS:
        classes = getattr(transformers, mapping).get(type(config), ())
        for made in classes if isinstance(classes, tuple) else (classes,):
            if made.__name__ in wanted:
                return getattr(transformers, auto)
            found.append(auto)
    return getattr(transformers, found[0] if found else "AutoModel")
