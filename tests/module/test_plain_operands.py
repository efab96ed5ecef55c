"""Plain tensors beside parameters: what one device does, each rank has its part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.torch_version import TorchVersion

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.module.dtensors.gathered_views import write_through_views
from sp_compiler.module.dtensors.patches import read_true_numbers
from sp_compiler.module.dtensors.plain_operands import take_plain_operands
from sp_compiler.module.dtensors.segmented_shard import segmented_shard
from sp_compiler.runtime.mesh_axes import TENSOR_AXIS
from tests.helpers.ranks import run_on_ranks

_PLACES: dict[str, Callable[[], Any]] = {
    "rows": lambda: Shard(0),
    "columns": lambda: Shard(1),  # of which the ranks have 3 and 2
    "segments": lambda: segmented_shard(0, (4, 2)),
    "replicated": Replicate,
}
if torch.__version__ < TorchVersion("2.12"):
    # Its DTensor has no rules for views and rows of segments.
    del _PLACES["segments"]
_START = torch.arange(-15, 15, dtype=torch.float64).view(6, 5)
_FULL = torch.linspace(0.5, 2, 30, dtype=torch.float64).view(6, 5)
_ROW, _COLUMN, _FEW = _FULL[0], _FULL[:, :1], _FULL[:2]
_MASK = torch.arange(30).view(6, 5) % 3 == 0
_ROWS, _PLACES_IN_ROWS = torch.tensor([0, 3]), (torch.arange(6) % 5)[:, None]

_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "copy_": lambda x: x.copy_(_FULL),
    "copy_ of another dtype": lambda x: x.copy_(_FULL.float()),
    "copy_ of a row": lambda x: x.copy_(_ROW),
    "data": lambda x: setattr(x, "data", _FULL.clone()),
    "the data's copy_": lambda x: x.data.copy_(_FULL),
    "add_": lambda x: x.add_(_FULL, alpha=-0.5),
    "+=": lambda x: x.__iadd__(_FULL),
    "+= of the data": lambda x: setattr(x, "data", x.data.__iadd__(_FULL)),
    "sub_": lambda x: x.sub_(_COLUMN),
    "mul_": lambda x: x.mul_(other=_FULL),
    "mul_ by a mask": lambda x: x.mul_(_MASK),
    "*=": lambda x: x.__imul__(_ROW),
    "div_": lambda x: x.div_(_FULL),
    "lerp_": lambda x: x.lerp_(_FULL, 0.3),
    "lerp_ by a tensor": lambda x: x.lerp_(_FULL, _FULL),
    "addcmul_": lambda x: x.addcmul_(_FULL, _ROW, value=2),
    "addcdiv_": lambda x: x.addcdiv_(_ROW, _FULL),
    "addmm_": lambda x: x.addmm_(_FULL[:, :3], _FULL[:3]),
    "clamp_": lambda x: x.clamp_(-_FULL, _FULL),
    "masked_fill_": lambda x: x.masked_fill_(_MASK, 0),
    "masked_scatter_": lambda x: x.masked_scatter_(_MASK, _FULL),
    "index_put_": lambda x: x.index_put_((_ROWS, _ROWS), _ROW[:2], accumulate=True),
    "index_copy_": lambda x: x.index_copy_(0, _ROWS, _FEW),
    "index_add_": lambda x: x.index_add_(0, _ROWS, _FEW),
    "put_": lambda x: x.put_(torch.tensor([1, 17]), _ROW[:2]),
    "scatter_": lambda x: x.scatter_(1, _PLACES_IN_ROWS, _COLUMN),
    "scatter_ of a number": lambda x: x.scatter_(1, _PLACES_IN_ROWS, 2.0),
    "scatter_add_": lambda x: x.scatter_add_(1, _PLACES_IN_ROWS, _COLUMN),
    "scatter_reduce_": lambda x: x.scatter_reduce_(1, _PLACES_IN_ROWS, _COLUMN, "amax"),
    "a row": lambda x: x.__setitem__(3, _ROW),
    "a row's copy_": lambda x: x[3].copy_(_ROW),
    "rows' add_": lambda x: x[2:4].add_(_FEW),
    "a column": lambda x: x.__setitem__((slice(None), 2), _COLUMN[:, 0]),
    "a block": lambda x: x.__setitem__((slice(1, 3), slice(1, 4)), _FEW[:, :3]),
    "listed rows": lambda x: x.__setitem__(_ROWS, _FEW),
    "a mask": lambda x: x.__setitem__(_MASK, _FULL[_MASK]),
    "the transposed": lambda x: x.t().copy_(_FULL.t()),
    "the diagonal": lambda x: x.diagonal().mul_(_ROW),
    "copied where": lambda x: x.copy_(torch.where(_MASK, x, _FULL)),
    "out": lambda x: torch.add(x, _FULL, out=x.data),
    "out of where": lambda x: torch.where(_MASK, x.detach(), _FULL, out=x.data),
    "a list": lambda x: torch._foreach_add_([x], [_FULL]),
    "copies of a list": lambda x: torch._foreach_copy_([x], [_FULL]),
    # Without any: DTensor has no rule for these.
    "a triangle": lambda x: x.tril_(),
    "sums": lambda x: x.cumsum_(1),
}


def _into_plain(x: Tensor) -> Tensor:
    written = _FULL.clone()
    written.copy_(x)
    written[1:3] = x[:2]
    return written.sub_(x, alpha=0.5)


def _into_number(x: Tensor) -> Tensor:
    numbers = torch.zeros(2, dtype=x.dtype)
    numbers[1] = x.sum()
    numbers[0].sub_(x[0].sum())
    total = torch.zeros((), dtype=x.dtype)
    total += x.sum()
    return numbers.add_(total).mul_(x[0, 1:3])


_READS: dict[str, Callable[[Tensor], Any]] = {
    "difference": lambda x: x - _FULL,
    "difference of a row": lambda x: _ROW - x,
    "sum": lambda x: x + _COLUMN,
    "product": lambda x: x * _FULL,
    "quotient": lambda x: _FULL / x.abs().clamp(min=1),
    "maximum": lambda x: torch.maximum(x, _FULL),
    "where": lambda x: torch.where(x > _FULL, x, _FULL),
    "==": lambda x: x.data == _FULL,
    "equal": lambda x: torch.equal(x, _FULL),
    "equal to itself": lambda x: torch.equal(_START, x),
    "allclose": lambda x: torch.allclose(x, _FULL),
    "allclose to itself": lambda x: torch.allclose(_START, x),
    "isclose": lambda x: torch.isclose(x, _START + 1e-9),
    "masked_fill": lambda x: x.masked_fill(_MASK, 2.0),
    "rows": lambda x: x[_ROWS],
    "elements of a mask": lambda x: x[_MASK],
    "positive elements": lambda x: x[x > 0],
    "gather": lambda x: x.gather(1, _PLACES_IN_ROWS),
    "lerp": lambda x: _FULL.lerp(x, 0.5),
    "selected rows": lambda x: x.index_select(0, _ROWS),
    "into a plain tensor": _into_plain,
    "into a number": _into_number,
}


def _install() -> None:
    read_true_numbers()
    write_through_views()
    take_plain_operands()


# Those that a gradient passes, rows twice.
_DIFFERENTIABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "difference": lambda x: x - _FULL,
    "product": lambda x: x * torch.stack([_FULL, 2 * _FULL]),
    "quotient": lambda x: _FULL / x.abs().clamp(min=1),
    "maximum": lambda x: torch.maximum(x, _FULL),
    "where": lambda x: torch.where(_MASK, x, _FULL),
    "masked_fill": lambda x: x.masked_fill(_MASK, 2.0),
    "rows": lambda x: x[torch.tensor([3, 0, 3])],
    "columns": lambda x: x[:, torch.tensor([4, 0, 4])],
    "elements": lambda x: x[torch.tensor([5, 0, 5]), torch.tensor([1, 0, 1])],
    "selected rows": lambda x: x.index_select(0, torch.tensor([3, 0, 3])),
    "elements of a mask": lambda x: x[_MASK],
    "taken": lambda x: x.take(torch.tensor([3, 20, 3])),
    "cat": lambda x: torch.cat([x, _FULL], 1),
    "written": lambda x: (x * 1).mul_(_FULL).masked_fill_(_MASK, 0),
    "written rows": lambda x: (x * 1).index_put_((_ROWS,), _FEW),
}


def _gradients(tp: int) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for where, placement in _PLACES.items():
        for name, operation in _DIFFERENTIABLE.items():
            x = nn.Parameter(_START.clone())
            if tp > 1:
                x = nn.Parameter(distribute_tensor(_START.clone(), _mesh(), [placement()]))
            operation(x).square().sum().backward()
            assert x.grad is not None
            result[f"{name}, {where}"] = _whole(x.grad)
    return result


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def _averaged(tp: int) -> list[dict[str, Tensor]]:
    """Numbers after averages took the place of parameters, for a time or for good."""
    torch.manual_seed(0)
    model: Any = _Model().double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    if tp > 1:
        model = sp_compiler.compile(model, tp=tp, example_inputs=((x,), {}))
    model(x)
    averages = {name: 2 * p.detach() for name, p in model.named_parameters()}
    result: list[dict[str, Tensor]] = []

    def note() -> None:
        result.append({name: _whole(p) for name, p in model.named_parameters()})
        result.append({name: _whole(p) for name, p in averages.items()} | {"y": _whole(model(x))})

    before = {name: p.data for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data = averages[name].data
    note()
    for name, p in model.named_parameters():
        p.data = before[name]
    note()
    for name, p in model.named_parameters():
        p.data, averages[name].data = averages[name].data, p.data
        averages[name].add_(1)
    note()
    for name, p in model.named_parameters():
        before[name] = p.data
        p.data = torch.full(p.shape, 0.25, dtype=p.dtype)
        before[name].sub_(1)
        p.data += 1
    note()
    for name, p in model.named_parameters():
        p.data = before[name]
    note()
    return result


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=(TENSOR_AXIS,))


def _on_both(
    mesh: DeviceMesh, operation: Callable[[Tensor], Any], placement: Any
) -> tuple[Any, Any, Any, Any]:
    """(result, value after) of a plain tensor, then of a DTensor."""
    plain = nn.Parameter(_START.clone())
    x = nn.Parameter(distribute_tensor(_START.clone(), mesh, [placement]))
    with torch.no_grad():
        result, distributed = operation(plain), operation(x)
        if isinstance(distributed, DTensor):
            distributed = distributed.full_tensor()
        return result, plain.data, distributed, x.full_tensor()


def _compared() -> dict[str, Any]:
    _install()
    mesh = _mesh()
    return {
        f"{name}, {where}": _on_both(mesh, operation, placement())
        for name, operation in {**_WRITES, **_READS}.items()
        for where, placement in _PLACES.items()
    }


def _refused() -> dict[str, Any]:
    mesh = _mesh()
    x = nn.Parameter(distribute_tensor(_START.clone(), mesh, [Shard(0)]))
    trained = _FULL.clone().requires_grad_()
    for operation in (lambda: x * trained, lambda: (x * 1).copy_(trained), lambda: x * 1 * trained):
        with pytest.raises(UnsupportedError, match=r"requires a gradient.*full_tensor\(\)"):
            operation()
    total = torch.zeros(())
    for add in (total.double().add_, total.double().copy_):
        with pytest.raises(UnsupportedError, match=r"into a plain tensor: what to do: total = "):
            add(x.sum())
    waits = (x * x).sum()
    x.data = 2 * x.data
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        waits.backward()
    x.data = x.data / 2
    over_data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    y = distribute_tensor(_START.clone(), over_data, [Shard(0)])
    with pytest.raises(UnsupportedError, match=r"aten.sub.*dp_shard.*, whose ranks may"):
        y - _FULL
    with pytest.raises(UnsupportedError, match=r"also used elsewhere.*data.copy_\(values\)"):
        y.data = _FULL
    y.data += 1
    with torch.no_grad():
        for write in (x.copy_, x.mul_):
            with pytest.raises(ArgumentError, match=r"got shape \(3, 5\).*part of a .*\(6, 5\)"):
                write(_FULL[:3])
        with pytest.raises(RuntimeError, match="must match"):
            x.copy_(_FULL[:4])
        with pytest.raises(UnsupportedError, match=r"float64 on cpu: expected.*float32"):
            x.data = _FULL.float()
        with pytest.raises(UnsupportedError, match=r"got \(3, 5\)"):
            x.data = _FULL[:3]
    return {"unchanged": torch.equal(x.full_tensor(), _START)}


def _own_values() -> dict[str, Any]:
    """Values that differ between ranks, and operations without plain tensors."""
    mesh = _mesh()
    result: dict[str, Any] = {}
    with torch.no_grad():
        for where, placement in _PLACES.items():
            x = distribute_tensor(_START.clone(), mesh, [placement()])
            x.mul_(_FULL * (1 + mesh.get_rank()))
            x[1] = _ROW + mesh.get_rank()
            x.data = x.data + 1
            result[where] = x.full_tensor()
        x = distribute_tensor(_START.clone(), mesh, [Shard(0)])
        with CommDebugMode() as communication:
            x.mul_(x).add_(x).sub_(x).copy_(x * 2 - x)
            torch._foreach_add_([x], [x])
    result["collectives"] = communication.get_total_counts()
    return result


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def _trained(tp: int) -> dict[str, Tensor]:
    """Parameters after steps with a penalty on their way from the start, and a pruning mask."""
    torch.manual_seed(0)
    model = _Model().double()
    start = {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    if tp > 1:
        model = sp_compiler.compile(model, tp=tp, example_inputs=((x,), {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        way = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
        way = way + sum((p * start[name]).sum() for name, p in model.named_parameters())
        optimizer.zero_grad()
        (model(x).square().mean() + 0.1 * way).backward()
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.mul_(start[name] > -0.1)
    return {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


def _in_threads() -> list[Tensor]:
    """Of operations that send nothing, half of them with plain tensors."""
    x = distribute_tensor(_START.clone(), _mesh(), [Shard(0)])

    def compute(other: Tensor) -> Tensor:
        for _ in range(300):
            result: Any = x * other - x
        return result.to_local()

    others = [_FULL, distribute_tensor(_FULL, x.device_mesh, [Shard(0)])] * 2
    with ThreadPoolExecutor(len(others)) as pool:
        return list(pool.map(compute, others))


def _all() -> tuple[Any, ...]:
    compared, threads = _compared(), _in_threads()
    return compared, _refused(), _own_values(), _gradients(2), threads, _averaged(2), _trained(2)


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_on_ranks(2, _all)


@pytest.mark.parametrize("name", [*_WRITES, *_READS])
def test_an_operation_is_that_of_one_device(ranks: Any, name: str) -> None:
    for compared, *_ in ranks:
        for where in _PLACES:
            result, after, distributed, distributed_after = compared[f"{name}, {where}"]
            assert torch.equal(distributed_after, after), where
            if name in _READS:
                torch.testing.assert_close(distributed, result, rtol=0, atol=0)


def test_what_is_ambiguous_is_refused(ranks: Any) -> None:
    assert all(refused["unchanged"] for _, refused, *_ in ranks)


def test_values_of_rank_0_count_and_other_operations_stay_local(ranks: Any) -> None:
    expected = _START * _FULL
    expected[1] = _ROW
    for _, _, own, *_ in ranks:
        for where in _PLACES:
            assert torch.equal(own[where], expected + 1), where
        assert own["collectives"] == 0


def test_gradients_are_those_of_one_device(ranks: Any) -> None:
    expected = _gradients(1)
    for _, _, _, gradients, *_ in ranks:
        for name in expected:
            assert torch.equal(gradients[name], expected[name]), name


def test_threads_take_plain_operands_at_the_same_time(ranks: Any) -> None:
    expected = (_START * _FULL - _START).chunk(2)
    for (*_, threads, _, _), part in zip(ranks, expected, strict=True):
        assert len(threads) == 4  # none raised
        assert all(torch.equal(result, part) for result in threads)


def test_averages_take_the_place_of_parameters_and_give_it_back(ranks: Any) -> None:
    expected = _averaged(1)
    for *_, averaged, _ in ranks:
        torch.testing.assert_close(averaged, expected, rtol=1e-12, atol=1e-14)


def test_a_penalty_on_the_way_from_plain_tensors_trains_like_one_device(ranks: Any) -> None:
    expected = _trained(1)
    for *_, trained in ranks:
        torch.testing.assert_close(trained, expected, rtol=1e-12, atol=1e-14)
