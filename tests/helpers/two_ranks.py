"""Models and a runner for checks that several ranks make at the same time."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import sp_compiler
from tests.helpers.shared_programs import shared_programs
from tests.helpers.users import gradients
from tests.models import zoo


def full(value: Any) -> Tensor:
    """The whole of a tensor, a copy."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def compiled(name: str = "plain", **options: Any) -> Any:
    """A zoo model of one layer in float64, compiled for all ranks."""
    fields = {key: options.pop(key) for key in ("dropout", "dtype") if key in options}
    model = zoo.build(name, layers=1, **fields)
    tp = options.pop("tp", None) or dist.get_world_size()
    return sp_compiler.compile(model, tp=tp, **options)


def eager(name: str = "plain", **fields: Any) -> Any:
    return zoo.build(name, layers=1, **fields)


def logits(one: Any, ids: Tensor) -> Tensor:
    """Result of the plain model without labels."""
    output = one(ids)
    return output if isinstance(output, Tensor) else output[0]


def assert_same_gradients(module: nn.Module, model: nn.Module, rtol: float = 1e-9) -> None:
    actual = {name: full(grad) for name, grad in gradients(module).items()}
    torch.testing.assert_close(actual, gradients(model), rtol=rtol, atol=rtol)


def train(module: Any, steps: int = 3) -> dict[str, Any]:
    """Steps with dropout, accumulation, clipping and a schedule; made before the first call."""
    torch.manual_seed(9)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=steps)
    losses, norms = [], []
    for step in range(steps):
        with module.no_sync():
            zoo.loss_of(module(**zoo.inputs("plain", seed=2 * step))).backward()
        loss = zoo.loss_of(module(**zoo.inputs("plain", seed=2 * step + 1)))
        loss.backward()
        norms.append(full(nn.utils.clip_grad_norm_(module.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    state = {name: full(value) for name, value in module.state_dict().items()}
    return {"losses": losses, "norms": norms, "state": state}


def run_checks(checks: Sequence[Callable[[], Any]], *, share: bool = True) -> dict[str, Any]:
    """Every check in one group; a failure is returned as text, so that it hides no other.

    With ``share`` the checks share programs, see :func:`shared_programs`.
    """
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    with shared_programs() if share else contextlib.nullcontext():
        for check in checks:
            try:
                results[check.__name__] = check()
            except BaseException:  # assertion errors and what pytest.raises throws
                results[check.__name__] = AssertionError(traceback.format_exc())
    return results


def result(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    """Results of the check, by rank."""
    found = [results[name] for results in ranks]
    for value in found:
        if isinstance(value, AssertionError):
            raise value
    return found
