"""Imports Triton for its interpreter if there is no GPU, whatever the environment says.

Fork servers import it first. Kernels, which are imported later, follow the environment of each process, and run in the
interpreter if that asks for it.
"""

import importlib.util
import os
from unittest import mock

import torch

with mock.patch.dict(os.environ, PYTORCH_NVML_BASED_CUDA_CHECK="1"):  # CUDA that is initialised here fails after a fork
    has_card = torch.cuda.is_available()
if importlib.util.find_spec("triton") and not has_card:
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.language")
