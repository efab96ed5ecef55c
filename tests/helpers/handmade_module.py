"""The handmade model compiled, counted and trained, for the tests of the module around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.runtime.group import tensor_parallel_group
from tests.models.handmade import Model, handmade


class Builder:
    """Counts compilations and looks at the model as the compiler would."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.seen: list[dict[str, Any]] = []

    def __call__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: Any,
        open_dims: bool,
    ) -> CompiledProgram:
        self.seen.append(
            {
                "training": model.training,
                "fixed": fixed,
                "shapes": {name: tuple(p.shape) for name, p in model.named_parameters()},
                "dtype": next(model.parameters()).dtype,
                "keys": list(kwargs),
            }
        )
        return handmade(self.world_size)


def handmade_model() -> Any:
    torch.manual_seed(3)
    return Model().double()


def handmade_input() -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def compiled_handmade(world_size: int) -> tuple[Any, Builder]:
    builder = Builder(world_size)
    return DistributedModule(handmade_model(), tensor_parallel_group(world_size), builder), builder


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def train(world_size: int, foreach: bool | None = None) -> dict[str, Any]:
    """Three AdamW steps with clipping and a schedule; optimizer made before the first call."""
    module, _ = compiled_handmade(world_size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=foreach)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms, losses = [], []
    for _ in range(3):
        out = module(handmade_input())
        out["loss"].backward()
        norms.append(full(nn.utils.clip_grad_norm_(module.parameters(), 0.5)).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(out["loss"].item())
    state = {name: full(value).detach().clone() for name, value in module.state_dict().items()}
    return {"norms": norms, "losses": losses, "state": state}


def expected_training() -> dict[str, Any]:
    model = handmade_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    norms, losses = [], []
    for _ in range(3):
        out = model(handmade_input())
        out["loss"].backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(out["loss"].item())
    return {"norms": norms, "losses": losses, "state": model.state_dict()}


def same_training(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(actual["norms"], expected["norms"], rtol=1e-10, atol=0)
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-10, atol=0)
    assert list(actual["state"]) == list(expected["state"])
    torch.testing.assert_close(actual["state"], dict(expected["state"]), rtol=1e-9, atol=1e-12)
