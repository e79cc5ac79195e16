"""Known harmless graph breaks of libraries, done before capture so that capture does not meet them."""

from __future__ import annotations

import sys

from torch import nn


def prepare(model: nn.Module) -> None:
    """Let Hugging Face models install their output recorders now: on the first call they do it under a lock.

    Tried on transformers 5.24; earlier versions have no recorders, and nothing is done.
    """
    recorders = sys.modules.get("transformers.utils.output_capturing")
    install = getattr(recorders, "maybe_install_capturing_hooks", None)
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if install is None or base is None:
        return
    for module in model.modules():
        if isinstance(module, base):
            install(module)
