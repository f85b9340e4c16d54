"""Imports Triton for its interpreter where there is no card, whatever the environment says.

The processes that others are forked from import it first. Kernels, which are imported later, follow the environment of
each process, and run in the interpreter where that asks for it.
"""

import importlib.util
import os
from unittest import mock

import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.language")
