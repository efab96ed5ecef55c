"""Marks of tests that not every admitted version of torch can run."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

NEEDS_V_SCHEDULES = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.12"), reason="schedules in V need torch 2.12"
)
