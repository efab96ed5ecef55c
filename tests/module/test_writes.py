"""Writes into sharded parameters and views of them: those of one device, each rank has its part."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from sp_compiler import UnsupportedError
from sp_compiler.module.dtensors.gathered_views import write_through_views
from sp_compiler.module.dtensors.patches import draw_whole_tensors, read_true_numbers
from sp_compiler.module.dtensors.plain_operands import take_plain_operands
from sp_compiler.module.dtensors.segmented_shard import segmented_shard
from tests.helpers.fake_group import fake_mesh
from tests.helpers.ranks import run_on_ranks

_PLACES: dict[str, Callable[[], Any]] = {
    "rows": lambda: Shard(0),
    "columns": lambda: Shard(1),
    "segments": lambda: segmented_shard(0, (4, 2)),
    "segments that one rank has": lambda: segmented_shard(0, (4, 2), units=1),
    "replicated": Replicate,
}
# Arguments besides the tensor of the functions of nn.init that need some.
_ARGUMENTS = {"constant_": [3.0], "sparse_": [0.5]}


def _init(name: str, x: Tensor) -> Tensor:
    # Of a convolution: dirac_ takes nothing else.
    weight = x.view(6, 4, 1) if name == "dirac_" else x
    getattr(nn.init, name)(weight, *_ARGUMENTS.get(name, []))
    return x


_FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.normal_(0, 0.02),
    "generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(7)),
    "uniform_": lambda x: x.data.uniform_(-1, 1),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: x.bernoulli_(torch.full_like(x, 0.4)),
    "bernoulli": lambda x: torch.bernoulli(x.abs().clamp(max=1)),
    "exponential_": lambda x: x.exponential_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.4),
    "log_normal_": lambda x: x.log_normal_(),
    "random_": lambda x: x.random_(3, 9),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 9),
    # Draws again until no number of any rank is outside.
    "truncated": lambda x: nn.init.trunc_normal_(x, std=0.02, a=-0.03, b=0.03),
}
_INITS = [
    name
    for name, function in vars(nn.init).items()
    # The others without the underscore are deprecated names of them.
    if inspect.isfunction(function) and name[0] != "_" and name[-1] == "_"
]
_FILLS |= {f"nn.init.{name}": functools.partial(_init, name) for name in _INITS}
_ROWS, _MASK = torch.tensor([0, 3]), torch.arange(30).view(6, 5) % 3 == 0


def _set(*where: Any, to: Any) -> Callable[[Tensor], None]:
    return lambda x: x.__setitem__(where if len(where) > 1 else where[0], to)


def _row(x: Tensor, values: Tensor) -> Tensor:
    """``values`` as ``x`` takes them."""
    if not isinstance(x, DTensor):
        return values
    return distribute_tensor(values, x.device_mesh, [Replicate()])


_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "a row": lambda x: x[1].zero_(),
    "rows": lambda x: x[1:5].fill_(7),
    "every second row": lambda x: x[::2].mul_(3),
    "a column": lambda x: x[:, 4].zero_(),
    "an element": _set(2, 3, to=5.0),
    "a view of a view": lambda x: x[2:5][1].zero_(),
    "a view of rows and columns": lambda x: x[2:5, 1:4].t()[1:][:, 0].fill_(2),
    "a row of the data": lambda x: x.data[4].zero_(),
    "a row of the detached": lambda x: x.detach()[4].zero_(),
    "a column of the transposed": lambda x: x.t()[1].zero_(),
    "a row of a new dim": lambda x: x[None][0, 1].zero_(),
    "parts": lambda x: [part.add_(i) for i, part in enumerate(x.split(4))],
    "parts of some sizes": lambda x: x.split([2, 3], 1)[1].zero_(),
    "chunks": lambda x: x.chunk(3)[2].zero_(),
    "the diagonal": lambda x: x.diagonal().fill_(9),
    "the diagonal in place": lambda x: x.fill_diagonal_(9),
    "a row of a view": lambda x: x.view(3, 2, 5)[1].fill_(9),
    "rows of a view": lambda x: x.view(3, 10)[1].fill_(9),
    "a row of the unflattened": lambda x: x.unflatten(0, (2, 3))[1].copy_(x[:3]),
    "elements of the flattened": lambda x: x.flatten()[3:7].fill_(9),
    "a row of the unbound": lambda x: x.unbind()[2].zero_(),
    "a window": lambda x: x.unfold(0, 2, 2)[1].fill_(9),
    "strided": lambda x: x.as_strided((3,), (6,)).fill_(9),
    "a number": _set(0, to=5.0),
    "a number in rows": _set(slice(1, 3), 2, to=5.0),
    "a number everywhere": _set(..., to=2.0),
    "a tensor": lambda x: x.__setitem__(5, _row(x, torch.arange(5.0, dtype=x.dtype))),
    "another row": lambda x: x[0].copy_(x[5]),
    "rows that overlap": lambda x: x[0:2].copy_(x[4:6] + x[0:2]),
    "listed rows": _set([0, 3], to=1.0),
    "rows by a tensor": _set(_ROWS, to=1.0),
    "columns by a list": _set(slice(None), [0, 3], to=1.0),
    "a mask": _set(_MASK, to=0.0),
    "a filled index": lambda x: x.index_fill_(0, _row(x, _ROWS), 3),
    "a copied index": lambda x: x.index_copy_(0, _row(x, _ROWS), x[1:3].clone()),
    "an added index": lambda x: x.index_add_(0, _row(x, _ROWS), x[1:3].clone()),
    "out": lambda x: torch.add(x[0], 1, out=x.data[2]),
    "a list": lambda x: torch._foreach_mul_([x[0], x[3]], 2.0),
    "drawn rows": lambda x: x[:3].normal_(),
    "drawn columns": lambda x: x[:, 1:3].uniform_(),
    "a drawn row": lambda x: x[1].bernoulli_(0.4),
}


def _read_after(write: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Add to everything what a view that is older than ``write`` shows."""

    def read(x: Tensor) -> Tensor:
        older = x[1:3], x.t()[2]
        write(x)
        return x.add_(sum(view.sum() for view in older))

    return read


_WRITES |= {
    "the view is read": _read_after(lambda x: x[1].fill_(3)),
    "the tensor is written, the view read": _read_after(lambda x: x.mul_(2)),
}


def _written() -> dict[str, tuple[Tensor, Tensor]]:
    """(of a plain tensor, of the DTensor) by write and placement."""
    draw_whole_tensors()
    write_through_views()
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for name, write in _WRITES.items():
        for where, placement in _PLACES.items():
            # Columns that the ranks have 3 and 2 of.
            start = torch.arange(-15, 15, dtype=torch.float64).view(6, 5)
            x = nn.Parameter(distribute_tensor(start, mesh, [placement()]))
            with torch.no_grad():
                torch.manual_seed(1)
                write(start)
                torch.manual_seed(1 + mesh.get_rank())
                write(x)
            result[f"{name}, {where}"] = (start, x.full_tensor())
    return result


_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": lambda x: x[:, 0],
    "rows": lambda x: x[1:3],
    "detached": lambda x: x.detach()[1],
    "view": lambda x: x.view(3, 2, 5),
    "unflattened": lambda x: x.unflatten(0, (2, 3)),
    "chunk": lambda x: x.chunk(2)[1],
    "transposed": lambda x: x.t()[1],
    "diagonal": lambda x: x.diagonal(),
    "written": lambda x: x[0].fill_(3) + x[1],
}


def _in_inference_mode() -> dict[str, tuple[Tensor, Tensor]]:
    """(of a plain tensor, of the DTensor) by view and placement."""
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for name, view in _VIEWS.items():
        for where, placement in _PLACES.items():
            start = torch.arange(-15, 15, dtype=torch.float64).view(6, 5)
            x = nn.Parameter(distribute_tensor(start, mesh, [placement()]))
            with torch.inference_mode():
                taken: Any = view(x)
                result[f"{name}, {where}"] = (view(start).clone(), taken.full_tensor().clone())
    return result


def _others() -> dict[str, Any]:
    """What a view of gathered rows is otherwise: any DTensor."""
    mesh = init_device_mesh("cpu", (2,))
    x = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
    product = x * 1
    product[0].mul_(3)
    product.sum().backward()
    x[1:3].full_tensor().sum().backward()
    assert isinstance(x.grad, DTensor)
    with torch.no_grad():
        # Both are written whole, and the second would undo the first.
        with pytest.raises(UnsupportedError, match="two views of the same tensor"):
            torch._foreach_mul_([x[0], x.t()[0]], 2.0)
        file = io.BytesIO()
        torch.save(x[0], file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        made = [loaded, copy.deepcopy(x[0]), x[1].clone(), x[1] + x[2]]
        pending = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()])
        with pytest.raises(UnsupportedError, match="with pending sums"):
            pending.index_fill_(0, torch.tensor([0]), 0.0)
        kept = x[0]
        if mesh.get_rank() == 0:
            x.to_local()[1].zero_()  # by itself: the other rank gathers nothing
        read = [kept.full_tensor().sum().item()]
        x.mul_(2)
        read.append(kept.full_tensor().sum().item())
    owner = weakref.ref(product)
    row = product[1]
    del product
    alive = [owner() is not None]
    del row
    gc.collect()
    return {
        "gradient": x.grad.full_tensor()[:, 0].tolist(),
        "kinds": [type(value) is DTensor for value in made],
        "alive": [*alive, owner() is not None],
        "read": read,
    }


def _drawn() -> dict[str, tuple[Tensor, Tensor]]:
    """(of a plain tensor, of the DTensor) by fill and placement."""
    draw_whole_tensors()
    write_through_views()
    read_true_numbers()
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for name, fill in _FILLS.items():
        for where, placement in _PLACES.items():
            start = torch.linspace(-1.5, 1.5, 24, dtype=torch.float64).view(6, 4)
            x = nn.Parameter(distribute_tensor(start, mesh, [placement()]))
            with torch.no_grad():
                torch.manual_seed(1)
                plain = fill(start)
                # Another state than that of rank 0, which counts.
                torch.manual_seed(1 + mesh.get_rank())
                value = fill(x)
            assert isinstance(value, DTensor)
            assert value.placements == x.placements
            result[f"{name}, {where}"] = (plain, value.full_tensor())
    return result


def _read() -> list[Any]:
    read_true_numbers()
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor([0.0, 0, 1, 3]), mesh, [Shard(0)])
    return [bool((x > 2).any()), x.sum().item(), float(x.sum()), int(x.mean())]


def _many_things() -> tuple[Any, ...]:
    take_plain_operands()
    return _drawn(), _read(), _written() | _in_inference_mode(), _others()


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_on_ranks(2, _many_things)


@pytest.mark.parametrize("fill", _FILLS)
def test_a_fill_is_that_of_one_device(ranks: Any, fill: str) -> None:
    for drawn, *_ in ranks:
        for where in _PLACES:
            plain, value = drawn[f"{fill}, {where}"]
            torch.testing.assert_close(value, plain, rtol=0, atol=0)


def test_a_number_is_summed_over_the_ranks(ranks: Any) -> None:
    """Of a sum that each rank has a summand of, DTensor reads the one of this rank."""
    for _, numbers, *_ in ranks:
        assert numbers == [True, 4.0, 4.0, 1]


@pytest.mark.parametrize("write", [*_WRITES, *_VIEWS])
def test_a_write_is_that_of_one_device(ranks: Any, write: str) -> None:
    """Rows of a sharded dim are gathered; a write into them has to reach the rank that has them."""
    for _, _, written, _ in ranks:
        for where in _PLACES:
            plain, value = written[f"{write}, {where}"]
            torch.testing.assert_close(value, plain, rtol=0, atol=0)


def test_a_view_of_gathered_rows_is_a_dtensor_like_any_other(ranks: Any) -> None:
    for *_, others in ranks:
        assert others["gradient"] == [3, 2, 2, 1, 1, 1]
        assert all(others["kinds"])
        assert others["alive"] == [True, False]  # as of any view, and no longer
        assert others["read"] == [4.0, 8.0]


def test_every_function_of_nn_init_is_among_the_fills() -> None:
    assert {"eye_", "dirac_", "orthogonal_", "sparse_", "trunc_normal_"} < set(_INITS)


def test_parts_that_require_a_gradient_beside_compiled_modules() -> None:
    """Code of others with DTensors, as ``parallelize_module`` makes them, works in one process."""
    for install in (take_plain_operands, write_through_views):
        install()
    part = torch.arange(24.0).view(2, 3, 4).requires_grad_()
    with fake_mesh(2) as mesh:
        x = DTensor.from_local(part * 1, mesh, [Shard(0)])  # computed, as activations are
        weight = distribute_tensor(torch.eye(4) * 2, mesh, [Replicate()])
        bias = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        y = F.linear(x, weight, bias).transpose(1, 2).to_local()
    assert torch.equal(y, part.detach().transpose(1, 2) * 2 + 1)
    y.sum().backward()
    assert part.grad is not None
    assert torch.equal(part.grad, torch.full((2, 3, 4), 2.0))


def test_views_on_ranks_that_cannot_talk_raise_what_torch_raises() -> None:
    """So the check of placements sees them, which falls back on rules of its own."""
    write_through_views()
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    x = DTensor.from_local(torch.ones(4, 3, device="meta"), mesh, [Shard(1)], run_check=False)
    with pytest.raises(NotImplementedError, match="as_strided"):
        x.as_strided((2,), (1,))
