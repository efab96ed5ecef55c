"""Settings of every test run."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers.fake_group import fake_mesh
from tests.helpers.interpreted_triton import Run, interpreter
from tests.helpers.old_objects import SOME_ARE_FROZEN, spare_old_objects

pytest.register_assert_rewrite("tests.helpers.parity")

# Tiny tensors and often several test processes: more threads only cost time.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.collect()
    spare_old_objects()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a new process; after the test what is frozen for all tests is so again."""
    SOME_ARE_FROZEN.stop()
    gc.unfreeze()
    yield
    gc.freeze()
    SOME_ARE_FROZEN.start()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks along "tp", of which this process plays the first."""
    with fake_mesh(2) as two_ranks:
        yield two_ranks


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Run]:
    """Calls functions in a process where Triton interprets kernels, one for all modules."""
    with interpreter() as run:
        yield run
