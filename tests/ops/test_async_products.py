"""Products that compute while their rows are moved: as two operators, and by torch's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn

from benchmarks.measure import PeakRecorder
from sp_compiler.base.placement import P, Placement, R, S
from sp_compiler.check.derive import declared_strategies
from sp_compiler.ir.fx import arguments
from sp_compiler.ops import async_products, communicator
from sp_compiler.ops.async_products import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from sp_compiler.ops.communicator import Communicator, running_on
from sp_compiler.verification.simulate import simulated_ranks
from tests.helpers import two_ranks
from tests.helpers.async_products import let_all_pay
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.one_operator import join, scatter
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

_GENERATOR = torch.Generator().manual_seed(0)
_X, _Y, _Z = (
    torch.randn(shape, dtype=torch.float64, generator=_GENERATOR)
    for shape in ((8, 12), (12, 16), (12, 4))
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_gather_matmul(world_size: int) -> None:
    with simulated_ranks(world_size) as tp:
        x, y = (scatter(value, S(dim), world_size, _GENERATOR) for value, dim in ((_X, 0), (_Y, 1)))
        z = scatter(_Z, R, world_size, _GENERATOR)
        called = ALL_GATHER_MATMUL.kernel(tp, x, [y, z])
        with running_on(tp):
            results = ALL_GATHER_MATMUL.overload(x, [y, z], world_size)
    wholes = (_X, R), (_X @ _Y, S(1)), (_X @ _Z, R)
    for result, same, (whole, placement) in zip(results, called, wholes, strict=True):
        joined = join(result, placement, tuple(whole.shape))
        assert torch.equal(joined, join(same, placement, tuple(whole.shape)))
        torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("placements", [(S(1), S(0)), (P, R), (R, P)], ids=str)
def test_matmul_reduce_scatter(placements: tuple[Placement, Placement], world_size: int) -> None:
    with simulated_ranks(world_size) as tp:
        x, y = (
            scatter(value, placement, world_size, _GENERATOR)
            for value, placement in zip((_X, _Y), placements, strict=True)
        )
        with running_on(tp):
            result = MATMUL_REDUCE_SCATTER.overload(x, y, world_size)
    whole = _X @ _Y
    joined = join(result, S(0), tuple(whole.shape))
    torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-12)


def test_declared_placements() -> None:
    """Every mix of factors in columns and whole ones; of a sum, every way to have one."""
    b = GraphBuilder()
    x, y, z = b.input("x", 4, 12), b.input("y", 12, 8), b.input("z", 12, 4)
    gathered = b.call(ALL_GATHER_MATMUL.overload, x, [y, z], 2)
    assert [value.shape for value in gathered.meta["val"]] == [(8, 12), (8, 8), (8, 4)]
    ways = declared_strategies(gathered, 2)
    assert ways is not None
    assert ((S(0), S(1), R), (R, S(1), R)) in [(way.operands, way.results) for way in ways]
    assert len(ways) == 4
    summed = b.call(MATMUL_REDUCE_SCATTER.overload, x, y, 2)
    assert summed.meta["val"].shape == (2, 8)
    ways = declared_strategies(summed, 2)
    assert ways is not None
    assert {way.operands for way in ways} == {(S(1), S(0)), (P, R), (R, P)}


class _OwnRows:
    """Sums like a rank among ranks that send zeros."""

    def reduce_scatter(self, x: Tensor, world_size: int) -> Any:
        return x.chunk(world_size)[0].clone


def test_scratch() -> None:
    """The whole product, of which the result is a part: no plan may forget it."""
    x, y = torch.ones(64, 32), torch.ones(32, 96)
    b = GraphBuilder()
    args = [b.input(name, *value.shape) for name, value in (("x", x), ("y", y))]
    node = b.call(MATMUL_REDUCE_SCATTER.overload, *args, 2)
    collectives: Any = _OwnRows()
    with PeakRecorder() as recorder:
        result = MATMUL_REDUCE_SCATTER.kernel(Communicator(None, 0, 2, collectives), x, y)
    scratch = recorder.peak_bytes(excluding=[x, y]) - result.nbytes
    declared = MATMUL_REDUCE_SCATTER.scratch_bytes(arguments(node), result)
    assert scratch == declared == 64 * 96 * 4


def _group(backend: str) -> Any:
    return SimpleNamespace(
        group_name="ranks", _get_backend=lambda device: SimpleNamespace(name=lambda: backend)
    )


@pytest.mark.parametrize(
    ("device", "backend", "found"),
    [("cuda", "nccl", "ranks"), ("cuda", "sp_emulated", None), ("cpu", "gloo", None)],
)
def test_who_reads_the_memory_of_whom(
    device: str, backend: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []

    def ask(group: Any, device: torch.device) -> bool:
        asked.append(device)
        return True

    monkeypatch.setattr(communicator, "ranks_read_each_other", ask)
    tp = Communicator(_group(backend), 0, 2)
    x: Any = SimpleNamespace(is_cuda=device == "cuda", device=torch.device(device))
    assert tp.symmetric_memory_group(x) == found
    assert tp.symmetric_memory_group(x) == found
    assert asked == [torch.device("cuda")] * (found is not None)  # once: the ranks wait for it
    assert Communicator(None, 0, 1).symmetric_memory_group(x) is None


def test_torchs_kernels_run_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take streams and memory of the current device."""
    current: list[Tensor] = []

    @contextlib.contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        current.append(x)
        yield
        current.clear()

    def ran(x: Tensor, *rest: Any) -> Any:
        assert current == [x]
        return x, [x]

    kernels = SimpleNamespace(fused_all_gather_matmul=ran, fused_matmul_reduce_scatter=ran)
    monkeypatch.setattr(async_products, "_kernels", lambda: kernels)
    monkeypatch.setattr(Communicator, "symmetric_memory_group", lambda tp, x: "ranks")
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    tp, x = Communicator(None, 0, 2), torch.ones(())
    assert async_products.all_gather_matmul(tp, x, [x]) == [x, x]
    assert async_products.matmul_reduce_scatter(tp, x, x) == (x, [x])


def _trained_by_torchs_kernels() -> tuple[list[Tensor], list[str]]:
    """Losses of a trained model, and torch's operators that it ran.

    Torch's references for its own kernels, which exist for CUDA alone, stand in for them.
    """
    library = torch.library.Library("symm_mem", "IMPL")
    ran = []
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        reference = getattr(symmetric_memory, f"_{name}_fallback")

        def record(*args: Any, name: str = name, reference: Any = reference, **kwargs: Any) -> Any:
            ran.append(name)
            return reference(*args, **kwargs)

        library.impl(name, record, "CPU")
    patched = pytest.MonkeyPatch()  # of a process that ends with this
    let_all_pay(patched)
    patched.setattr(Communicator, "symmetric_memory_group", lambda tp, x: tp._group.group_name)
    return _losses(two_ranks.compiled("plain", async_tp=True)), ran


def _losses(module: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = zoo.loss_of(module(**zoo.inputs("plain", seq=8, seed=step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(two_ranks.full(loss))
    return losses


@pytest.mark.slow
def test_two_ranks_train_by_torchs_kernels() -> None:
    expected = _losses(two_ranks.eager("plain"))
    for losses, ran in run_on_ranks(2, _trained_by_torchs_kernels):
        torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
        assert ran.count("fused_all_gather_matmul") == 3 * 3
        assert ran.count("fused_matmul_reduce_scatter") == 3 * 2
