"""Packages whose wheels are built for CUDA, imported with a CPU build of torch."""

from __future__ import annotations

import importlib.util
import sys
import types

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def import_without_kernels() -> None:
    """Make torchvision and torchaudio importable where their C++ code cannot be loaded.

    The models here do not use that code. torchvision registers shapes for two operators that are
    then missing: declaring them is enough. torchaudio fails when its library does not load, unless
    the module that loads it reports that it is not available.
    """
    if importlib.util.find_spec("torchvision"):
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", _SCHEMA)
    if importlib.util.find_spec("torchaudio") and not torch.cuda.is_available():
        extension = types.ModuleType("torchaudio._extension")
        vars(extension).update(
            _IS_TORCHAUDIO_EXT_AVAILABLE=False,
            _IS_ALIGN_AVAILABLE=False,
            fail_if_no_align=lambda function: function,
        )
        sys.modules["torchaudio._extension"] = extension
