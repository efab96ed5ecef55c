"""Hooks and gradients of parameters, also of tied ones, are eager code's where they come later."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import sp_compiler
from tests.helpers import grids
from tests.helpers.fake_group import fake_group
from tests.helpers.rehearsal import run_rehearsed
from tests.models import zoo

_MICROBATCHES = 2


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(
    "frozen",
    [
        ("token_embedding.weight", "position_embedding.weight"),  # nothing below the first layer
        (),  # with the head, which is the table of tokens, the gradient of which has two parts
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_hooks_run_once_a_microbatch_with_its_gradient(
    frozen: tuple[str, ...], schedule: str
) -> None:
    model = zoo.build("plain", layers=2)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    eager, batch = copy.deepcopy(model), zoo.inputs("plain", 4, 8)
    with fake_group(1):
        pipeline = sp_compiler.pipeline(
            model,
            mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp")),
            example_inputs=((), batch),
            microbatches=_MICROBATCHES,
            schedule=schedule,
        )
        trained = {name: p for name, p in pipeline.named_parameters() if p.requires_grad}
        calls = _hooked(trained)
        pipeline.step(**batch)
    assert calls == dict.fromkeys(trained, _MICROBATCHES)
    _hooked({name: eager.get_parameter(name) for name in trained})
    for number in range(_MICROBATCHES):
        part = {name: value.chunk(_MICROBATCHES)[number] for name, value in batch.items()}
        (zoo.loss_of(eager(**part)) / _MICROBATCHES).backward()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, eager.get_parameter(name).grad)


def _hooked(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Put on hooks that see a sum and its parts apart; counts of the hooks behind them."""
    calls = dict.fromkeys(parameters, 0)
    for name, parameter in parameters.items():
        parameter.register_hook(lambda grad: grad / grad.norm())

        def count(_: Tensor, name: str = name) -> None:
            calls[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    return calls


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, hidden: Tensor, norm: nn.Module) -> Tensor:
        return hidden + self.down(self.up(norm(hidden)).relu())


class _OneNorm(nn.Module):
    """One norm for all tokens, of which each rank has a part, and for what is pooled, which each
    rank has whole: the gradient has a part that is still to be summed over ranks, and one that is
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.layers = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, self.norm)
        logits = self.head(self.norm(hidden[:, 0]))
        return nn.functional.cross_entropy(logits, labels)


def _gradients() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Those of a pipeline of one stage, and those of eager code, of one step."""
    torch.manual_seed(0)
    model = _OneNorm().double()
    eager = copy.deepcopy(model)
    ids, labels = torch.randint(32, (4, 8)), torch.randint(5, (4,))
    pipeline = sp_compiler.pipeline(
        model,
        mesh=grids.mesh(pp=1, tp=2),
        example_inputs=((ids, labels), {}),
        microbatches=_MICROBATCHES,
        schedule="zero_bubble",
    )
    pipeline.step(ids, labels)
    eager(ids, labels).backward()  # microbatches are equally long
    return tuple(  # type: ignore[return-value]
        {name: grids.whole(value.grad) for name, value in module.named_parameters()}
        for module in (pipeline, eager)
    )


@pytest.mark.slow
def test_gradients_of_a_tied_parameter_are_added_up_by_what_is_still_to_be_reduced() -> None:
    for delayed, true in run_rehearsed(2, _gradients):
        torch.testing.assert_close(delayed, true)


class _TwoBiases(nn.Module):
    """Two parameters whose gradients are one tensor, that of the activation they are added to, and
    two projections, whose gradients are parts of one product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(1, 8, 16)) for _ in range(2))
        self.query, self.key = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.first + self.second
        return self.query(hidden).sigmoid() * self.key(hidden)


class _Summed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


class _Copies(TorchDispatchMode):
    """Counts the copies of tensors, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.shapes[tuple(args[0].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_a_delayed_gradient_is_copied_only_if_another_tensor_has_its_elements() -> None:
    model = _Summed(nn.ModuleList(_TwoBiases() for _ in range(2)))
    eager, hidden = copy.deepcopy(model), torch.randn(_MICROBATCHES, 8, 16)
    with fake_group(1):
        pipeline = sp_compiler.pipeline(
            model,
            mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "tp")),
            example_inputs=((hidden,), {}),
            microbatches=_MICROBATCHES,
            schedule="zero_bubble",
        )
        with _Copies() as copies:
            pipeline.step(hidden)
        grads = {name: grids.whole(value.grad) for name, value in pipeline.named_parameters()}
    (eager(hidden) / _MICROBATCHES).backward()
    torch.testing.assert_close(grads, {name: p.grad for name, p in eager.named_parameters()})
    assert copies.shapes[1, 8, 16]  # the biases
    assert not copies.shapes[16, 16]
