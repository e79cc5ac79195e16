"""Without a GPU the kernels run under Triton's interpreter, which has to be asked for before they are first used."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
