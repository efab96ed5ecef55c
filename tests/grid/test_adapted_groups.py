"""What FSDP2's groups of parameters do otherwise in a compiled module; one rank, and two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sp_compiler
from sp_compiler.grid.fully_sharded import FullySharded
from tests.helpers import grids
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import WIDTH, Block, batch


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_training_goes_on_behind_a_forward_in_inference_mode_and_a_cast(dtype: torch.dtype) -> None:
    """FSDP keeps the tensors of its first call, and fails when it gathers into them again."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    managed = FullySharded({"": model}, list)
    managed.parameters(1)
    with torch.inference_mode():
        assert model(x).is_inference()
    model.to(dtype)
    managed.follow_dtypes()
    model(x.to(dtype)).pow(2).sum().backward()
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    torch.testing.assert_close(gradients, [gradient.to(dtype) for gradient in expected])


class _Both(torch.autograd.Function):
    """Returns what it gets, and hands on the gradients that there are, as a region does."""

    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


@pytest.mark.usefixtures("one_rank")
def test_a_missing_gradient_is_handed_on_as_it_is() -> None:
    layers: Any = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    for layer in (*layers, layers):
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    FullySharded(dict(layers.named_modules()), list).parameters(1)
    x = torch.ones(2, 3)
    reached, _ = _Both.apply(layers[2](x), layers[1](layers[0](x)))  # type: ignore[no-untyped-call]
    reached.sum().backward()
    assert [layer.weight.grad is None for layer in layers] == [True, True, False]


class _Losses(nn.Module):
    """Layers with a loss each, and one behind the first two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(0.0) for _ in range(4))
        self.head, self.early = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.double()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        outputs = [x]
        for block in self.blocks:
            outputs.append(block(outputs[-1]))
        return {
            "last": self.head(outputs[-1]).square().mean(),
            "early": self.early(outputs[2]).square().mean(),
            "head alone": self.head(outputs[-1].detach()).square().mean(),
        }


def _trained_by_each_loss() -> None:
    """With weight decay, which shrinks parameters by a gradient of zeros, and not by none."""
    for axis in ("dp_shard", "dp_replicate"):
        mesh, model = grids.mesh(**{axis: 2, "tp": 1}), _Losses()
        x = batch().chunk(2)[dist.get_rank()]
        module: Any = sp_compiler.compile(_Losses(), mesh=mesh, example_inputs=((x,), {}))
        for one, own in ((module, x), (model, batch())):
            optimizer = torch.optim.AdamW(one.parameters(), lr=0.01, weight_decay=0.1)
            for loss in ("early", "head alone", "last"):
                one(own)[loss].backward()
                optimizer.step()
                if loss != "last":
                    optimizer.zero_grad()
        assert grids.parameter_error(module, model) < 1e-12
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (module.get_parameter(name).grad is None), name


@pytest.mark.slow
def test_layers_that_a_loss_does_not_reach_are_not_trained_by_it() -> None:
    run_on_ranks(2, _trained_by_each_loss)
