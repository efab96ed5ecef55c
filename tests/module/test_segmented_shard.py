"""DTensors of parameters stored in segments: what an operation returns is true, or it raises.

All ranks are simulated in one process, with torch's own rules for DTensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler import UnsupportedError
from sp_compiler.base.placement import Placement, S
from sp_compiler.module.dtensors.segmented_shard import segmented_shard, segments_of
from sp_compiler.module.parameters import mesh_placement, tensor_spec
from sp_compiler.runtime.padding import stored_part
from tests.helpers.fake_group import fake_group
from tests.helpers.slow import slow
from tests.helpers.torch_versions import NO_PLAN_FOR_STRIDED_ALONE

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# Whatever torch has no rule for, or cannot do without another layout; none may be wrong instead.
_ERRORS = (RuntimeError, NotImplementedError, UnsupportedError)
_PLACEMENTS = {
    2: (S(0, (8, 2, 2)), S(1, (4, 2))),
    3: (S(0, (3, 6, 3)), S(0, (6, 6), 2)),
    4: (S(0, (4, 8)), S(1, (6,))),
}
_FAST = (2, S(0, (8, 2, 2)))
_CASES = [
    case if case == _FAST else slow(*case)
    for case in ((size, place) for size, places in _PLACEMENTS.items() for place in places)
]
_SHAPE = (12, 6)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """A mesh of ``request.param`` simulated ranks."""
    size: int = request.param
    with fake_group(size), LocalTensorMode(size):
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def test_strided_shards_of_others_are_split_as_before() -> None:
    """FSDP's placements of a sharded dim have no segments: every second part, two by two."""
    segmented_shard(0, (2, 4, 2))  # from now on torch's own splits go past ours
    shard = _StridedShard(0, split_factor=2)
    assert not segments_of(shard)
    parts, _ = shard._split_tensor(torch.arange(8), 2, with_padding=False)
    assert [part.tolist() for part in parts] == [[0, 1, 4, 5], [2, 3, 6, 7]]


def _cases(places: Any = _CASES) -> Any:
    return pytest.mark.parametrize(("ranks", "where"), places, indirect=["ranks"], ids=str)


def _stored(full: Tensor, where: Placement, mesh: DeviceMesh) -> DTensor:
    """``full`` as the ranks store a parameter that is placed so."""
    size = mesh.size()
    parts = {rank: stored_part(full, where, rank, size) for rank in range(size)}
    local = LocalTensor(parts)
    return DTensor(local, tensor_spec(mesh, full.shape, full.dtype, where), requires_grad=False)


def _full(value: Any) -> Any:
    """A result as every rank sees it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, LocalTensor):
        return value
    first, *others = value._local_tensors.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)
    return first


def _random(seed: int) -> Tensor:
    return torch.randn(_SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _newton_schulz(x: Any, _: Any) -> Any:
    """The orthogonalisation of Muon, on whole matrices."""
    x = x.T if x.size(0) > x.size(1) else x
    x = x / x.norm()
    for _ in range(3):
        gram = x @ x.mT
        x = 3.4 * x + (-4.8 * gram + 2.0 * gram @ gram) @ x
    return x


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda a, b: a,
    "sum": lambda a, b: a + b,
    "product": lambda a, b: a * b,
    "transposed": lambda a, b: a.T,
    "matrix product": lambda a, b: a @ b.mT,
    "gram": lambda a, b: a.mT @ a,
    "muon": _newton_schulz,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "column sums": lambda a, b: a.sum(0),
    "row sums": lambda a, b: a.sum(1),
    "norm": lambda a, b: a.norm(),
    "column norms": lambda a, b: a / a.norm(dim=0, keepdim=True),
    "largest": lambda a, b: a.max(),
    "softmax": lambda a, b: a.softmax(0),
    "sorted": lambda a, b: a.sort(0)[0],
    "cumulative": lambda a, b: a.cumsum(0),
    "rows": lambda a, b: a[2:5],
    "one row": lambda a, b: a[3],
    "columns": lambda a, b: a[:, 1:3],
    "segment": lambda a, b: a.split([8, 2, 2])[1],
    "narrow": lambda a, b: a.narrow(0, 3, 4),
    "heads": lambda a, b: a.view(2, 6, 6),
    "other heads": lambda a, b: a.view(6, 2, 6),
    "split columns": lambda a, b: a.view(12, 2, 3),
    "flat": lambda a, b: a.flatten(),
    "unsqueezed": lambda a, b: a[:, None],
    "concatenated": lambda a, b: torch.cat([a, b]),
    "stacked": lambda a, b: torch.stack([a, b]),
    "expanded": lambda a, b: a.unsqueeze(0).expand(3, 12, 6),
    "repeated": lambda a, b: a.repeat(2, 1),
    "rolled": lambda a, b: a.roll(1, 0),
    "flipped": lambda a, b: a.flip(0),
    "triangle": lambda a, b: a.tril(),
    "diagonal": lambda a, b: a.diagonal(),
    "singular values": lambda a, b: torch.linalg.svdvals(a),
    "linear": lambda a, b: torch.nn.functional.linear(b, a),
    "choice": lambda a, b: torch.where(a > b, a, b),
    "copied": lambda a, b: a.clone().copy_(b),
    "lerp": lambda a, b: a.clone().lerp_(b, 0.3),
    "foreach": lambda a, b: torch._foreach_add([a], [b], alpha=2)[0],
    "foreach norm": lambda a, b: torch._foreach_norm([a, b])[1],
    "argmax": lambda a, b: a.argmax(0),
    "index of largest": lambda a, b: a.max(0)[1],
    "equal": lambda a, b: a.eq(b),
    "count": lambda a, b: (a > 0).sum(),
    "empty like": lambda a, b: torch.zeros_like(a) + a,
    "dtype": lambda a, b: a.to(torch.float32).double(),
}
_ALWAYS = ("itself", "sum", "product", "transposed", "matrix product", "gram", "muon", "norm")
_ALWAYS += ("column sums", "row sums", "rows", "copied", "lerp", "foreach", "foreach norm")


@_cases()
def test_operations_are_true_or_raise(ranks: DeviceMesh, where: Placement) -> None:
    first, second = _random(1), _random(2)
    a = _stored(first, where, ranks)
    same = _stored(second, where, ranks)
    others = [same.redistribute(ranks, [to]) for to in (Replicate(), Shard(0), Shard(1))]
    for index, (name, operation) in enumerate(_OPERATIONS.items()):
        expected = operation(first, second)
        # Torch takes a tenth of a second for each operation with placements that it has not seen.
        for b in (same, others[index % len(others)]):
            try:
                result = _full(operation(a, b))
            except _ERRORS:
                assert name not in _ALWAYS, name
                continue
            torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9, msg=f"{name} {b}")


@_cases()
def test_round_trips(ranks: DeviceMesh, where: Placement) -> None:
    full = _random(3)
    stored = _stored(full, where, ranks)
    placed = mesh_placement(where)
    for to in (Replicate(), Shard(0), Shard(1)):
        there = stored.redistribute(ranks, [to])
        assert torch.equal(_full(there), full)
        back = there.redistribute(ranks, [placed])
        assert back._spec == stored._spec
        for rank in range(ranks.size()):
            part = stored_part(full, where, rank, ranks.size())
            assert torch.equal(back._local_tensor._local_tensors[rank], part)
    made = distribute_tensor(full, ranks, [placed])
    assert torch.equal(_full(made), full)
    assert made.placements == stored.placements


@_cases()
def test_elementwise_optimizers_send_nothing(ranks: DeviceMesh, where: Placement) -> None:
    parameter = torch.nn.Parameter(_stored(_random(4), where, ranks))
    grad = _random(5)
    parameter.grad = _stored(grad, where, ranks)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5, eps=0.0, foreach=True)
    with CommDebugMode() as collectives:
        optimizer.step()
        optimizer.step()
    assert collectives.get_total_counts() == 0
    moment = _full(optimizer.state[parameter]["exp_avg"])
    torch.testing.assert_close(moment, 0.19 * grad, rtol=1e-12, atol=0)
    # Of equal gradients every step of AdamW is the learning rate.
    expected = (_random(4) * 0.95 - 0.1 * grad.sign()) * 0.95 - 0.1 * grad.sign()
    torch.testing.assert_close(_full(parameter.detach()), expected, rtol=1e-12, atol=1e-12)


@_cases([(2, S(0, (8, 2, 2)))])
def test_what_needs_a_range_of_rows_raises(ranks: DeviceMesh, where: Placement) -> None:
    stored = _stored(_random(6), where, ranks)
    with pytest.raises(UnsupportedError, match=r"no contiguous rows.*state_dict\(\)"):
        stored.__create_write_items__("weight", stored)


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("where", [S(0, (8, 2, 2)), S(0, (6, 4)), S(1, (4, 2))], ids=str)
def test_another_axis_over_the_same_rows(ranks: DeviceMesh, where: Placement) -> None:
    """As ``fully_shard`` cuts a part of a tensor-parallel rank, also into uneven chunks."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    with _disable_current_modes():  # else each part would be one of four ranks
        full = _random(7)[: sum(where.segments) if where.dim == 0 else None]
        rows = [stored_part(full, where, rank, 2).chunk(2, where.dim) for rank in range(2)]
        parts = {rank: rows[rank % 2][rank // 2].clone() for rank in range(4)}
    own = (_StridedShard(where.dim, split_factor=2), segmented_shard(where.dim, where.segments))
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    stored = DTensor(LocalTensor(parts), DTensorSpec(mesh, own, meta), requires_grad=False)
    for other in itertools.product(
        (Replicate(), Shard(0), Shard(1), own[0]), (Replicate(), Shard(0), Shard(1), own[1])
    ):
        is_alone = other[0] == own[0] and other[1] not in (own[1], Shard(where.dim))
        if is_alone and NO_PLAN_FOR_STRIDED_ALONE:
            continue
        moved = stored.redistribute(placements=other)
        assert torch.equal(_full(moved), full), other
        assert torch.equal(moved.redistribute(placements=own).to_local(), stored.to_local()), other
    torch.testing.assert_close(_full(stored.norm(dim=0)), full.norm(dim=0))


def test_placements_are_told_apart() -> None:
    first = segmented_shard(0, (8, 2, 2))
    assert first == segmented_shard(0, (8, 2, 2))
    assert hash(first) == hash(segmented_shard(0, (8, 2, 2)))
    others = (
        segmented_shard(1, (8, 2, 2)),
        segmented_shard(0, (2, 8, 2)),
        segmented_shard(0, (4, 4, 4)),
        _StridedShard(0, split_factor=3),
        Shard(0),
    )
    assert first not in others
    assert len({first, *others}) == 6
    assert segments_of(first) == (8, 2, 2)
    assert [segments_of(other) for other in others[3:]] == [(), ()]
    assert "segments=(8, 2, 2)" in repr(first)
    assert repr(_StridedShard(0, split_factor=3)) == "_StridedShard(dim=0, sf=3)"


def test_segments_from_another_process_raise() -> None:
    with pytest.raises(UnsupportedError, match="another process"):
        segments_of(_StridedShard(0, split_factor=-5))
