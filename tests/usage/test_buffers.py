"""Buffers: read, written back, kept replicated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from tests.helpers.slow import slow
from tests.helpers.users import assert_same_gradients, batch, compiled


class Statistics(nn.Module):
    """A running mean, a counter and a buffer that is left out of checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.mean: Tensor
        self.steps: Tensor
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            self.steps += 1
        return (self.linear(x - self.mean) + self.shift).square().mean()


class Normalized(nn.Module):
    """Batch normalization with its own running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


class OfRows(Normalized):
    """The same by the function, which counts no steps."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        y = F.batch_norm(self.first(x), norm.running_mean, norm.running_var, training=self.training)
        return self.second(torch.relu(y)).square().mean()


class OfInstances(Normalized):
    """Normalization of each instance, with running statistics over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(16, track_running_stats=True)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x).view(2, 3, 16).mT).mT
        return self.second(torch.relu(y)).square().mean()


class Compared(Normalized):
    """One encoder of two inputs: the second call takes the statistics that the first has made."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.norm(self.first(each)) for each in (x, 2 * x.flip(0)))
        return (self.second(first) - self.second(torch.relu(second))).square().mean()


class UnderTwoNames(nn.Module):
    """One layer in two places of a list, which writes in place and by a norm."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(Statistics(), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.layers: Any = nn.ModuleList([layer, nn.Linear(8, 8), layer])

    def forward(self, x: Tensor) -> Tensor:
        losses = [self.layers[0][0](x)]
        for layer in self.layers:
            layers = list(layer)[1:] if isinstance(layer, nn.Sequential) else [layer]
            for each in layers:
                x = torch.tanh(each(x))
            losses.append(self.layers[2][0](x).detach())
        return x.square().mean() + torch.stack(losses).mean()


def _build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.parametrize(
    "kind", [Statistics, Normalized, OfRows, OfInstances, Compared, UnderTwoNames]
)
def test_mutations_are_written_back(kind: type[nn.Module]) -> None:
    module: Any = compiled(lambda: _build(kind))
    model = _build(kind)
    for seed in range(3):
        for one in (module, model):
            one(batch(6, seed=seed)).backward()
    for one in (module, model):
        one.eval()
        one(batch(6)).backward()
    assert_same_gradients(module, model)
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-12, atol=1e-14
    )
    assert list(module.state_dict()) == list(model.state_dict())


def test_buffers_can_be_changed_loaded_and_copied() -> None:
    module: Any = compiled(lambda: _build(Statistics))
    model: Any = _build(Statistics)
    module(batch(6))
    for one in (module, model):
        one.steps.fill_(5)
        one.mean = torch.full((8,), 0.5, dtype=torch.float64)
        one.shift.zero_()
    twin = copy.deepcopy(module)
    torch.testing.assert_close(module(batch(6)), model(batch(6)), rtol=1e-12, atol=0)
    assert module.steps.item() == 6
    assert twin.steps.item() == 5
    torch.testing.assert_close(twin(batch(6)), module.eval()(batch(6)), rtol=1, atol=1)
    model.load_state_dict(module.state_dict())
    assert model.steps.item() == 6


def test_mutation_without_gradients() -> None:
    module: Any = compiled(lambda: _build(Statistics))
    with torch.no_grad():
        module(batch(6))
        module(batch(6))
    assert module.steps.item() == 2


class _Setting(nn.Module):
    """Exchanges its buffers in forward, by one of the functions below."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        # In front of the others, which it moves for who counts buffers by their names.
        self.register_buffer("none", None)
        self.register_buffer("total", torch.ones(8))
        self.register_buffer("other", torch.zeros(8))
        self.change = change

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        before = self.change(self, y.detach().mean(0))
        return y * self.total + self.other, before


class _Nested(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Setting(change) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x, first = self.layers[0](x)
        x, second = self.layers[1](x)
        return x, [first, second]


def _set_twice(module: Any, mean: Tensor) -> None:
    module.total = module.total + mean
    module.total.mul_(0.5)
    module.total = module.total * 2


def _exchange(module: Any, mean: Tensor) -> None:
    module.total, module.other = module.other, module.total
    module.total.add_(mean)


def _return_the_old_one(module: Any, mean: Tensor) -> Tensor:
    before = module.total
    module.total = mean + module.total
    part: Tensor = before[1:]
    return part


@pytest.mark.parametrize("kind", [slow(_Setting), _Nested])
@pytest.mark.parametrize("change", [_set_twice, _exchange, _return_the_old_one])
def test_buffers_that_forward_sets(kind: Any, change: Callable[[Any, Tensor], Any]) -> None:
    module: Any = compiled(lambda: _build(lambda: kind(change)))
    model: Any = _build(lambda: kind(change))
    for seed in range(3):
        x = batch(6, seed=seed)
        torch.testing.assert_close(module(x), model(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-12, atol=0
    )


def _grow(module: Any, mean: Tensor) -> None:
    module.other = torch.cat([module.other, mean])[-9:]
    module.none = mean
    module.other = module.other[1:].float()


@pytest.mark.parametrize("kind", [_Setting, _Nested])
def test_a_buffer_that_changes_its_kind_stays_and_a_warning_says_so(kind: Any) -> None:
    module: Any = compiled(lambda: _build(lambda: kind(_grow)))
    model: Any = _build(lambda: kind(_grow))
    x = batch(6)
    said = r"other \(float64 \[8\] on cpu -> float32 \[8\] on cpu\)"
    with pytest.warns(UserWarning, match=said) as caught:
        first = module(x)
    assert "none (None -> float64 [8] on cpu)" in str(caught[0].message)
    torch.testing.assert_close(first, model(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(module(x), first, rtol=1e-12, atol=0)


def test_a_length_stays_with_the_table_that_it_is_for() -> None:
    """Else a call after a longer one would take rows that the table of before does not have."""

    class Table(nn.Linear):
        longest = 0
        weights: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.longest:
                self.longest = x.shape[1]
                self.weights = torch.arange(1.0, self.longest + 1, dtype=x.dtype)[:, None]
            return super().forward(x) * self.weights[: x.shape[1]]

    model = Table(8, 3, dtype=torch.float64)
    model.register_buffer("weights", torch.zeros(0, 1, dtype=torch.float64))
    module = sp_compiler.compile(copy.deepcopy(model), tp=1)
    with pytest.warns(UserWarning, match=r"longest \(0 -> 6\), weights \(float64 \[0, 1\]"):
        module(batch())
    for _ in range(2):
        torch.testing.assert_close(module(batch()), model(batch()), rtol=1e-12, atol=0)


def test_a_counter_that_reaches_a_size_of_a_table_by_chance() -> None:
    """The table is set anew in every call, of eight columns as before."""

    class Table(nn.Linear):
        calls = 0
        weights: Tensor

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype)
            self.weights, self.calls = rows[:, None].expand(-1, 8), self.calls + 8
            return super().forward(x * self.weights * self.calls)

    model = Table(8, 3, dtype=torch.float64)
    model.register_buffer("weights", torch.zeros(0, 8, dtype=torch.float64))
    module = sp_compiler.compile(copy.deepcopy(model), tp=1)
    with (
        pytest.warns(UserWarning, match=r"will not: weights \(float64 \[0, 8\]"),
        pytest.warns(UserWarning, match="numbers that it changes: calls"),
    ):
        module(batch())
    model(batch())
    torch.testing.assert_close(module(batch()), model(batch()), rtol=1e-12, atol=0)


def test_a_buffer_of_two_modules_that_each_of_them_sets() -> None:
    model: Any = _build(lambda: _Nested(_set_twice))
    model.layers[1].total = model.layers[0].total
    with pytest.warns(UserWarning, match=r"layers\.0\.total \(no longer shared\)"):
        compiled(lambda: model)(batch(6))
