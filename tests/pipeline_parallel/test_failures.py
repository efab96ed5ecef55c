"""A rank of a pipeline that raises, or hangs: all ranks of the mesh raise, and say why."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from sp_compiler import RankFailureError, RankMismatchError
from tests.helpers import grids
from tests.helpers.ranks import run_on_copies
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.models import zoo

_FAILING = 3  # part 1 of the data, stage 1


def _step(hook: Callable[..., None], patience: timedelta) -> tuple[str, float]:
    """Run a step during which ``hook`` runs on the failing rank; the error, and after how long.

    Stages wait for messages for ``patience``, and for compilations as long as a busy machine takes.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "pp"))
    part, parts = sp_compiler.data_shard(mesh)
    own = grids.split(zoo.inputs("llama", batch=8, seq=8), parts)[part]
    pipeline: Any = sp_compiler.pipeline(
        zoo.build("llama", layers=2),
        mesh=mesh,
        example_inputs=((), own),
        microbatches=4,
        rank_timeout=90.0,
    )
    pipeline.step(**own)
    for runner in pipeline._runners.values():
        runner._messages._watchdog.timeout = patience
    pipeline.module.zero_grad()
    if dist.get_rank() == _FAILING:
        pipeline.module.model.layers[1].register_forward_hook(hook)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(Exception, match=r"rank_timeout|boom") as caught:
        pipeline.step(**own)
    taken = time.monotonic() - start
    assert not [name for name, p in pipeline.named_parameters() if p.grad is not None]
    with pytest.raises(RankFailureError, match="start all"):
        pipeline.step(**own)
    return f"{caught.type.__name__}: {caught.value}", taken


def _boom(*_: Any) -> None:
    raise ValueError("boom")


def _hang(*_: Any) -> None:
    time.sleep(8.0)


def _compile() -> None:
    with shared_programs():
        micro = zoo.inputs("llama", batch=1, seq=8)
        compile_for_ranks(zoo.build("llama", layers=2), micro, schedule="1f1b")


def _failures() -> list[tuple[str, float]]:
    warnings.simplefilter("ignore")
    with shared_programs(only_known=True):
        raised = _step(_boom, timedelta(seconds=90))
        dist.barrier()
        hung = _step(_hang, timedelta(seconds=3))
    dist.barrier()
    return [raised, hung]


@pytest.mark.slow
def test_all_ranks_raise_when_one_fails_or_hangs() -> None:
    results = run_on_copies(4, _compile, _failures)
    for rank, (raised, hung) in enumerate(results):
        text, seconds = raised
        assert "boom" in text, (rank, text)
        assert text.startswith("ValueError" if rank == _FAILING else RankFailureError.__name__)
        assert seconds < 15
        text, seconds = hung
        kinds = (RankFailureError.__name__, RankMismatchError.__name__)
        assert text.startswith(kinds), (rank, text)
        assert "rank_timeout" in text
        assert seconds < 30
