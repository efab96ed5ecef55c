"""Settings of every test run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.fake_group import fake_mesh
from tests.helpers.interpreted_triton import Run, interpreter

pytest.register_assert_rewrite("tests.helpers.parity")

# Tiny tensors and often several test processes: more threads only cost time.
torch.set_num_threads(1)


# Every compilation asks whether somebody has frozen objects, and the answer counts the frozen ones:
# 40 ms each time, a seventh of the time of all tests.
_SOME_ARE_FROZEN = mock.patch.object(gc, "get_freeze_count", return_value=1)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the 700,000 objects of torch, transformers and the tests.

    They live to the end. Looking at them again in every full collection took an eighth of the
    time of all tests; graphs are cycles, so that collections are frequent here.
    """
    gc.collect()
    gc.freeze()
    _SOME_ARE_FROZEN.start()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a new process; after the test what is frozen for all tests is so again."""
    _SOME_ARE_FROZEN.stop()
    gc.unfreeze()
    yield
    gc.freeze()
    _SOME_ARE_FROZEN.start()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks along "tp", of which this process plays the first."""
    with fake_mesh(2) as two_ranks:
        yield two_ranks


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Calls functions in a process where Triton interprets kernels."""
    with interpreter() as run:
        yield run
