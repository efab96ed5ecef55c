"""Ranks that are copies of a process which compiled what they will ask for.

Each rank of a test would compile the same programs for itself, which takes most of its time. Here
one process runs the same function first, as rank 0 of a group whose collectives do nothing: its
numbers are wrong, its programs are those of the ranks. What it did not get to, for a check that
wrong numbers fail, each rank compiles as ever. That ranks compile the same is proven elsewhere, see
``tests/helpers/shared_programs.py``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from sp_compiler.pipeline_parallel.microbatches import batch_size, microbatches_of
from sp_compiler.pipeline_parallel.pipeline_module import PipelineModule
from tests.helpers.fake_group import fake_group
from tests.helpers.ranks import run_on_copies
from tests.helpers.shared_programs import shared_programs


def run_rehearsed(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    rehearsal: Callable[..., Any] | None = None,
) -> list[Any]:
    """As ``run_on_ranks``, with programs that were compiled once for all ranks.

    ``function`` must leave nothing behind that a second call would trip over, such as files; else
    ``rehearsal(*args)`` compiles for it.
    """
    before = functools.partial(_rehearse, world_size, rehearsal or function, args)
    return run_on_copies(world_size, before, _perform, function, args)


def _rehearse(world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.suppress(Exception, pytest.fail.Exception),
        fake_group(world_size),
        mock.patch("torch.testing.assert_close"),
        # torch would remember its plan for one rank.
        mock.patch.multiple(checkpoint, save=mock.DEFAULT, load=mock.DEFAULT),
        mock.patch.object(PipelineModule, "_run", _compiled_alone),
        shared_programs(),
    ):
        warnings.simplefilter("ignore")
        function(*args)
    # What it holds are meshes of a group that is no more.
    _clear_sharding_prop_cache()


def _compiled_alone(pipeline: Any, args: Any, kwargs: Any, *, train: bool, loss_only: bool) -> Any:
    """What a pipeline compiles for a call: stages that ran would wait for others' tensors."""
    leaves, structure, names = pipeline._flat(args, kwargs)
    batch = batch_size(pipeline.module.forward, args, kwargs)
    pipeline._state.loss_only = loss_only
    parts = microbatches_of(leaves, names, batch, pipeline._microbatches)
    pipeline._program_of(parts, structure)
    return torch.zeros(()) if loss_only else mock.MagicMock()


def _perform(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with shared_programs():
        return function(*args)
