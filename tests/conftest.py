"""Settings of every test run."""

from __future__ import annotations

import pytest
import torch

pytest.register_assert_rewrite("tests.helpers.parity")

# Tiny tensors and often several test processes: more threads only cost time.
torch.set_num_threads(1)
