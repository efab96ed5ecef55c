"""Marks of tests that not every admitted version of torch can run."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

NEEDS_V_SCHEDULES = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.12"), reason="schedules in V need torch 2.12"
)

# In float64 attention's log-sum-exp has eight bytes; fakes of these say four, and so does a plan.
FAKES_HALVE_LOG_SUM_EXP = torch.__version__ < TorchVersion("2.13")

# A loss is compared row by row with its classes before it is known where both come from, so that
# the message says the former alone.
COUNTS_CLASSES_FIRST = torch.__version__ < TorchVersion("2.13")

# Along dims in another order than those of memory, the fake transform of torch 2.11 is too small
# for its own strides, and raises an error. (2.12 has not been tried.)
FAKE_TRANSFORMS_NEED_ORDER = torch.__version__ < TorchVersion("2.13")

# DTensor of torch 2.11 has no plan for a strided shard of a dim that no later axis shards, and
# raises an error. (2.12 has not been tried.)
NO_PLAN_FOR_STRIDED_ALONE = torch.__version__ < TorchVersion("2.13")

# Group norms of CPUs read the elements of any strides.
GROUP_NORMS_READ_STRIDES = torch.__version__ >= TorchVersion("2.14")
