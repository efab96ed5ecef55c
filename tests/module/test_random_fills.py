"""Random numbers drawn into sharded parameters: those of one device, each rank has its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sp_compiler.module.dtensor_patches import draw_whole_tensors, read_true_numbers
from sp_compiler.module.segmented_shard import segmented_shard
from tests.helpers.ranks import run_on_ranks

_PLACES: dict[str, Callable[[], Any]] = {
    "rows": lambda: Shard(0),
    "columns": lambda: Shard(1),
    "segments": lambda: segmented_shard(0, (4, 2)),
    "replicated": Replicate,
}
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
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_normal_,
    # Draws again until no number of any rank is outside.
    "truncated": lambda x: nn.init.trunc_normal_(x, std=0.02, a=-0.03, b=0.03),
}


def _drawn() -> dict[str, tuple[Tensor, Tensor]]:
    """(of a plain tensor, of the DTensor) by fill and placement."""
    draw_whole_tensors()
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


def _many_things() -> tuple[Any, Any]:
    return _drawn(), _read()


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_on_ranks(2, _many_things)


@pytest.mark.parametrize("fill", _FILLS)
def test_a_fill_is_that_of_one_device(ranks: Any, fill: str) -> None:
    for drawn, _ in ranks:
        for where in _PLACES:
            plain, value = drawn[f"{fill}, {where}"]
            torch.testing.assert_close(value, plain, rtol=0, atol=0)


def test_a_number_is_summed_over_the_ranks(ranks: Any) -> None:
    """Of a sum that each rank has a summand of, DTensor reads the one of this rank."""
    for _, numbers in ranks:
        assert numbers == [True, 4.0, 4.0, 1]
