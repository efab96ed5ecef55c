"""Calls of a training loop, through the public API."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.slow import slow
from tests.helpers.users import assert_same_gradients, batch, compiled, gradients, net, prepared


@pytest.fixture
def pair() -> tuple[Any, nn.Module]:
    """A compiled module and the same model, fresh for each test."""
    return prepared(), net()


def test_several_forwards_before_one_backward(pair: tuple[Any, nn.Module]) -> None:
    for one in pair:
        losses = [one(batch(seed=seed))["loss"] * (seed + 1) for seed in range(3)]
        torch.stack(losses).sum().backward()
    assert_same_gradients(*pair)


def test_backwards_in_another_order_than_forwards(pair: tuple[Any, nn.Module]) -> None:
    for one in pair:
        first, second = (one(batch(seed=seed))["loss"] for seed in range(2))
        first.backward()
        second.backward()
    assert_same_gradients(*pair)


def test_accumulation_over_microbatches(pair: tuple[Any, nn.Module]) -> None:
    module, model = pair
    for seed in range(3):
        model(batch(seed=seed))["loss"].backward()
    with module.no_sync():
        for seed in range(2):
            module(batch(seed=seed))["loss"].backward()
    module(batch(seed=2))["loss"].backward()
    assert_same_gradients(module, model)


class _Views(nn.Module):
    """Returns views of what it computes and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.up(x.flatten(0, 1)).exp()
        return rows.unflatten(0, x.shape[:2]), rows.sum().view(1), x.flatten(0, 1)


def test_outputs_may_be_changed_in_place() -> None:
    torch.manual_seed(0)
    model = _Views()
    module: Any = sp_compiler.compile(copy.deepcopy(model), tp=1, recompute="full")
    x, gradients = torch.randn(2, 3, 8, dtype=torch.float64), []
    for one in (module, model):
        logits, loss, _ = one(x)
        loss /= 2
        scaled = logits.clone() if one is model else logits  # the model has saved them
        scaled /= 3
        (loss + scaled.square().sum()).backward()
        gradients.append(one.get_parameter("up.weight").grad)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=0)


backends = pytest.mark.parametrize("backend", ["eager", slow("inductor")])


@backends
def test_a_view_of_an_input_stays_one(backend: str) -> None:
    module: Any = sp_compiler.compile(_Views(), tp=1, backend=backend)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    _, loss, rows = module(x)
    rows *= 0
    assert not x.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@backends
def test_outputs_that_are_saved_may_not(backend: str) -> None:
    module: Any = sp_compiler.compile(_Views(), tp=1, recompute="none", backend=backend)
    logits, loss, _ = module(torch.randn(2, 3, 8, dtype=torch.float64))
    logits /= 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_a_subset(pair: tuple[Any, nn.Module]) -> None:
    results = []
    for one in pair:
        loss = one(batch())["loss"]
        wanted = [one.get_parameter("blocks.1.up.weight"), one.get_parameter("head.bias")]
        results.append(torch.autograd.grad(loss, wanted))
        assert not gradients(one)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=0)


def test_gradient_of_an_input(pair: tuple[Any, nn.Module]) -> None:
    results = []
    for one in pair:
        x = batch().requires_grad_()
        one(x)["loss"].backward()
        results.append(x.grad)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=0)


def test_gradient_of_an_input_alone(pair: tuple[Any, nn.Module]) -> None:
    results = []
    for one in pair:
        one.requires_grad_(False)
        x = batch().requires_grad_()
        one(x)["loss"].backward()
        results.append(x.grad)
        assert not gradients(one)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=0)


def test_any_output_can_be_differentiated(pair: tuple[Any, nn.Module]) -> None:
    """The loss stays unused, or several outputs are used together."""
    for outputs in (["rows"], ["y", "loss"], ["y", "rows", "loss"]):
        for one in pair:
            one.zero_grad()
            found = one(batch())
            sum((found[name].sin().sum() for name in outputs), torch.zeros(())).backward()
        assert_same_gradients(*pair)


def test_a_forward_without_backward_leaves_no_trace(pair: tuple[Any, nn.Module]) -> None:
    for one in pair:
        one(batch(seed=7))
        one(batch())["loss"].backward()
    assert_same_gradients(*pair)


def test_retained_graph(pair: tuple[Any, nn.Module]) -> None:
    for one in pair:
        loss = one(batch())["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert_same_gradients(*pair)


def test_double_backward_raises(pair: tuple[Any, nn.Module]) -> None:
    module, _ = pair
    loss = module(batch())["loss"]
    (grad,) = torch.autograd.grad(loss, [module.head.weight], create_graph=True)
    with pytest.raises(UnsupportedError, match="use the original model"):
        grad.square().sum().backward()


def test_gradients_as_operands_of_create_graph_are_right(pair: tuple[Any, nn.Module]) -> None:
    found = [
        torch.autograd.grad(
            one(batch())["loss"], [one.get_parameter("head.weight")], create_graph=True
        )[0]
        for one in pair
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_with_an_optimizer_made_before_the_first_call(set_to_none: bool) -> None:
    module, model = compiled(), net()
    for one in (module, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for seed in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            one(batch(seed=seed))["loss"].backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-12
    )


def test_optimizer_with_a_closure(pair: tuple[Any, nn.Module]) -> None:
    for one in pair:
        optimizer = torch.optim.LBFGS(one.parameters(), max_iter=3)

        def closure(one: Any = one, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = one(batch())["loss"]
            loss.backward()
            return loss

        optimizer.step(closure)
    module, model = pair
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-7, atol=1e-9
    )


def test_parameter_groups_by_name(pair: tuple[Any, nn.Module]) -> None:
    module, model = pair
    for one in (module, model):
        decay = [p for name, p in one.named_parameters() if "norm" not in name]
        rest = [p for name, p in one.named_parameters() if "norm" in name]
        groups: list[dict[str, Any]] = [{"params": decay}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups)
        for _ in range(2):
            one(batch())["loss"].backward()
            optimizer.step()
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-12
    )


def _scale_data(one: Any) -> None:
    one.get_parameter("blocks.0.up.weight").data.mul_(0.5)


def _initialise(one: Any) -> None:
    torch.manual_seed(0)
    nn.init.xavier_uniform_(one.get_parameter("blocks.1.down.weight"))
    nn.init.zeros_(one.get_parameter("head.bias"))


def _add_without_grad(one: Any) -> None:
    with torch.no_grad():
        one.get_parameter("head.weight").add_(1.0)


def _replace_data(one: Any) -> None:
    one.get_parameter("head.weight").data = torch.ones(3, 8, dtype=torch.float64)


@pytest.mark.parametrize("change", [_scale_data, _initialise, _add_without_grad, _replace_data])
def test_parameters_changed_in_place(pair: tuple[Any, nn.Module], change: Any) -> None:
    for one in pair:
        change(one)
    actual, true = (one(batch())["loss"] for one in pair)
    torch.testing.assert_close(actual, true, rtol=1e-12, atol=0)
    actual.backward()
    true.backward()
    assert_same_gradients(*pair)


def test_a_parameter_changed_between_forward_and_backward_raises(
    pair: tuple[Any, nn.Module],
) -> None:
    for one in pair:
        loss = one(batch())["loss"]
        with torch.no_grad():
            one.get_parameter("head.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_backward_that_fails_leaves_the_module_usable(pair: tuple[Any, nn.Module]) -> None:
    module, model = pair

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("no")

    handle = module.head.weight.register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        module(batch())["loss"].backward()
    handle.remove()
    module.zero_grad()
    for one in pair:
        one(batch())["loss"].backward()
    assert_same_gradients(module, model)
