"""A rank that fails or hangs on a grid with data axes: all ranks raise, and say why."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import sp_compiler
from sp_compiler import RankFailureError, RankMismatchError
from sp_compiler.grid.fully_sharded import param_groups
from sp_compiler.grid.watched_group import WatchedGroup, watched
from tests.helpers import expert_models, grids
from tests.helpers.expert_models import Grouped
from tests.helpers.ranks import run_on_copies
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.models import zoo

_FAILING = 3  # the last part of the data, and the last rank of "tp" where there is one
_GRIDS = (
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 1},
    {"dp_shard": 2, "pp": 2},
)
_WITH_EXPERTS = {"dp_shard": 2, "ep": 2, "tp": 1}
_PARTS_ALONE = {"dp_shard": 2, "tp": 1}


class _Boom(Exception):
    pass


def _boom(*_: Any) -> None:
    raise _Boom("boom")


def _hang(*_: Any) -> None:
    time.sleep(8.0)


def _model(axes: dict[str, int], parts: int) -> tuple[Any, grids.Batch]:
    """With four rows for each part."""
    if "ep" in axes:
        return expert_models.model(Grouped), expert_models.batches(1, rows=4 * parts)[0]
    return zoo.build("llama", layers=2), zoo.inputs("llama", batch=4 * parts, seq=8)


def _compile(grids_of_runs: Iterable[dict[str, int]], *, fsdp: tuple[bool, ...] = (True,)) -> None:
    """What the runs on these grids need, on the one process that their ranks are copies of."""
    with shared_programs():
        for axes in grids_of_runs:
            model, batch = _model(axes, 1)
            tp, ep = axes.get("tp", 1), axes.get("ep", 1)
            if "pp" in axes:
                compile_for_ranks(model, grids.split(batch, 2)[0], tp=tp, ep=ep, schedule="1f1b")
                continue
            for applied in fsdp:
                compile_for_ranks(model, batch, tp=tp, ep=ep, fsdp=applied)


class _Run:
    """A model and its optimizer on ``axes``; groups of their own, for failures break them."""

    def __init__(self, axes: dict[str, int], **options: Any) -> None:
        # Meshes of the same ranks are equal to it: it would find the groups of an earlier one.
        _clear_sharding_prop_cache()
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        part, parts = sp_compiler.data_shard(mesh)
        model, batch = _model(axes, parts)
        self.batch = grids.split(batch, parts)[part]
        build: Any = sp_compiler.pipeline if "pp" in axes else sp_compiler.compile
        options |= {"microbatches": 2} if "pp" in axes else {}
        example = ((), self.batch)
        self.module: Any = build(
            model,
            mesh=mesh,
            example_inputs=example,
            rank_timeout=90.0,
            **options,
        )
        self.tree: Any = self.module.module if "pp" in axes else self.module
        self.optimizer = torch.optim.AdamW(self.module.parameters())

    @property
    def layer(self) -> Any:
        return getattr(self.tree, "model", self.tree).layers[1]

    def step(self) -> None:
        if self.tree is self.module:
            zoo.loss_of(self.module(**self.batch)).backward()
        else:
            self.module.step(**self.batch)
        sp_compiler.clip_grad_norm_(self.module, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def be_impatient(self, timeout: timedelta) -> None:
        """Wait for other ranks for ``timeout`` from now on, but not while ranks compile."""
        group = self.tree._sp_state.group
        infos = [each.mesh_info for each in param_groups(self.tree.modules())]
        groups = [each for info in infos for each in vars(info).values()]
        found = [each._collectives for each in groups if isinstance(each, WatchedGroup)]
        assert found
        experts = group.communicator.experts
        others = [group.collectives, None if experts is None else experts._exchange]
        for each in (*found, *filter(None, others)):
            each._timeout = timeout
        for board in group.boards():
            board.timeout = timeout


def _on_failing(hook: Callable[..., None]) -> Callable[..., None]:
    """Hooks of blocks must be on every rank."""
    return lambda *args: hook(*args) if dist.get_rank() == _FAILING else None


def _in_forward(run: _Run) -> None:
    run.layer.register_forward_hook(_on_failing(_boom))


def _in_backward(run: _Run) -> None:
    run.layer.register_full_backward_hook(_on_failing(_boom))


def _in_optimizer(run: _Run) -> None:
    run.optimizer.register_step_pre_hook(_on_failing(_boom))


def _ids_out_of_range(run: _Run) -> None:
    if dist.get_rank() == _FAILING:
        run.batch = {**run.batch, "input_ids": run.batch["input_ids"] + 10**6}


def _hanging(run: _Run) -> None:
    run.layer.register_forward_hook(_on_failing(_hang))


def _raised(axes: dict[str, int], disturb: Callable[[_Run], None]) -> tuple[str, float]:
    """What this rank raises within two steps, after a good one, and after how many seconds."""
    run = _Run(axes)
    # The default group may be one that breaks.
    unharmed = dist.new_group()
    run.step()
    if disturb is _hanging:
        run.be_impatient(timedelta(seconds=3))
    disturb(run)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(Exception, match=r"boom|rank_timeout|out of range|AdamW") as caught:
        run.steps(2)
    taken = time.monotonic() - start
    if disturb is _in_optimizer and dist.get_rank() == _FAILING:
        # Caught by the user, who goes on: only now does this rank know that it was a failure.
        with pytest.raises(RankFailureError, match="step"):
            run.step()
    dist.barrier(unharmed)
    with pytest.raises(RankFailureError, match="start all"):
        run.step()
    return f"{caught.type.__name__}: {caught.value}", taken


_DISTURBED = (_in_forward, _in_backward, _in_optimizer, _hanging)
_CASES = [
    (axes, disturb)
    for axes in _GRIDS
    for disturb in _DISTURBED
    # A pipeline has no whole backward on one rank, and tests of its own for what its stages do.
    if "pp" not in axes or disturb is _in_optimizer
]
_CASES.append((_GRIDS[1], _ids_out_of_range))


# "dp_shard" and "ep" together are the default group, which a failure breaks: one a process.
_ALL_CASES = [_CASES, *([(_WITH_EXPERTS, disturb)] for disturb in (_in_backward, _hanging))]


def _all_raised(index: int) -> list[tuple[str, float]]:
    warnings.simplefilter("ignore")
    with shared_programs(only_known=True):
        return [_raised(axes, disturb) for axes, disturb in _ALL_CASES[index]]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(_ALL_CASES)))
def test_all_ranks_raise_when_one_fails_or_hangs(index: int) -> None:
    before = functools.partial(_compile, [axes for axes, _ in _ALL_CASES[index]])
    ranks = run_on_copies(4, before, _all_raised, index)
    for number, (axes, disturb) in enumerate(_ALL_CASES[index]):
        for rank, results in enumerate(ranks):
            (text, seconds), where = results[number], (axes, disturb.__name__, rank)
            kinds = [RankFailureError.__name__]
            said = "boom"
            if disturb is _hanging:
                said = "rank_timeout"
                kinds.append(RankMismatchError.__name__)
            elif disturb is _ids_out_of_range:
                said = "out of range"
                kinds.append(IndexError.__name__ if rank == _FAILING else "")
            elif rank == _FAILING:
                kinds = [_Boom.__name__]
            elif disturb is _in_optimizer:
                said = "AdamW.step() raised an error"
            assert text.partition(":")[0] in kinds, (where, text)
            assert said in text, (where, text)
            # The process group's own timeout is three minutes.
            assert seconds < 40, (where, seconds)


def _goes_on_after_failed_backwards(axes: dict[str, int]) -> bool:
    """All ranks catch the same error in a backward: FSDP2 reduces gradients as before."""
    run = _Run(axes)

    def gradients() -> dict[str, torch.Tensor]:
        run.module.zero_grad()
        zoo.loss_of(run.module(**run.batch)).backward()
        return {n: grids.local(p.grad).clone() for n, p in run.module.named_parameters()}

    expected = gradients()
    for layer in run.tree.model.layers:  # before any block's end, and between two
        hook = layer.register_full_backward_hook(_boom)
        with pytest.raises(_Boom):
            gradients()
        hook.remove()
        found = gradients()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    return True


_SHARDED_OR_REPLICATED = ({"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2})


def _all_go_on() -> bool:
    with shared_programs(only_known=True):
        return all(map(_goes_on_after_failed_backwards, _SHARDED_OR_REPLICATED))


@pytest.mark.slow
def test_failed_backwards_that_all_ranks_catch_are_over() -> None:
    before = functools.partial(_compile, _SHARDED_OR_REPLICATED)
    assert all(run_on_copies(4, before, _all_go_on))


def _fails_alone() -> None:
    """Without FSDP2 a rank waits for no other part of the data, and may catch its own errors."""
    run = _Run(_PARTS_ALONE, fsdp=False)
    for register in (run.layer.register_forward_hook, run.layer.register_full_backward_hook):
        if dist.get_rank() == 1:
            hook = register(_boom)
            with pytest.raises(_Boom):
                zoo.loss_of(run.module(**run.batch)).backward()
            hook.remove()
        start = time.monotonic()
        zoo.loss_of(run.module(**run.batch)).backward()
        assert time.monotonic() - start < 30  # of the 90 for which ranks wait


def _numbers() -> bool:
    with shared_programs(only_known=True):
        _same_numbers()
        _fails_alone()
        return _goes_on_after_failed_backwards(_PARTS_ALONE)


def _same_numbers() -> None:
    """Collectives of a watched group are torch's own, to the bit; torch knows it as the group."""
    run = _Run(_PARTS_ALONE)
    group = run.tree._sp_state.group.data.mesh.get_group(0)
    stand_in = watched(group)
    assert isinstance(stand_in, WatchedGroup)
    assert watched(stand_in) is stand_in
    assert dist.get_process_group_ranks(stand_in) == [0, 1]
    own = torch.rand(4, 3, generator=torch.Generator().manual_seed(dist.get_rank()))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        results = []
        for each in (group, stand_in):
            part, gathered, total = torch.empty(2, 3), torch.empty(8, 3), own.clone()
            sent = own.clone()
            dist.reduce_scatter_tensor(part, sent, op, group=each)
            assert torch.equal(sent, own)
            dist.all_gather_into_tensor(gathered, own, group=each)
            dist.all_reduce(total, op, group=each)
            results.append(torch.cat([part, gathered, total]))
        assert torch.equal(*results)


@pytest.mark.slow
def test_watched_groups_compute_the_same_and_outlive_failures_of_all() -> None:
    before = functools.partial(_compile, [_PARTS_ALONE], fsdp=(True, False))
    assert all(run_on_copies(2, before, _numbers))
