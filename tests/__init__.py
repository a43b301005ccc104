"""Without a GPU, kernels run in Triton's interpreter, to be chosen before anything imports it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
