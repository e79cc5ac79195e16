"""State dicts and checkpoints of sharded models.

`model.state_dict()` and `optimizer.state_dict()` hold DTensors, as torch.distributed.checkpoint takes them. The functions
here go further: whole state dicts on rank 0, safetensors of transformers, and training checkpoints that a kill cannot break.
All of them but `latest` are collectives: every rank calls them. Where a rank fails it raises what went wrong there, and all
others a RuntimeError that says so.
"""

from fxshard.checkpoint.contents import Incompatible
from fxshard.checkpoint.hugging_face import load_safetensors, save_safetensors
from fxshard.checkpoint.training import latest, load, save
from fxshard.checkpoint.whole import full_state_dict, load_full_state_dict, stream_state_dict

__all__ = [
    "Incompatible",
    "full_state_dict",
    "latest",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "save",
    "save_safetensors",
    "stream_state_dict",
]
