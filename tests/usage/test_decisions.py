"""Models that branch on numbers in their inputs and buffers, through the public API."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.slow import slow_but
from tests.helpers.users import WIDTH, assert_same_gradients, batch, compiled, num_compiled


class Deciding(nn.Module):
    """Scales by whether there is a mask, cuts to a length, and warms up for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mask: Tensor, lengths: Tensor | None = None) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.calls <= 2:
            y = y / 2
        if lengths is not None:
            y = y * (torch.arange(int(lengths.max())) < lengths[:, None])[..., None]
        if not mask.any():
            return y
        return y.masked_fill(mask[..., None], 0.0)


def _masks(*shape: int) -> tuple[Tensor, Tensor]:
    mask = torch.zeros(shape, dtype=torch.bool)
    other = mask.clone()
    other[0, 0] = True
    return mask, other


def test_every_call_takes_the_path_of_its_own_numbers() -> None:
    eager = Deciding()
    module = compiled(lambda: copy.deepcopy(eager))
    none, some = _masks(2, 3)
    # Warming up without a mask and with one, warm likewise; none of the four is met again.
    for mask, programs in ((none, 1), (some, 2), (some, 3), (none, 4), (some, 4), (none, 4)):
        x = batch(2, 3)
        expected, result = eager(x, mask), module(x, mask)
        torch.testing.assert_close(result, expected, rtol=1e-11, atol=0)
        assert num_compiled(module) == programs
        expected.square().sum().backward()
        result.square().sum().backward()
    assert_same_gradients(module, eager)
    assert int(module.calls) == 6


def test_one_program_with_open_sizes_for_each_decision() -> None:
    eager = Deciding()
    module = compiled(lambda: copy.deepcopy(eager))
    eager.calls.fill_(5)
    module.calls.fill_(5)
    for seq in (3, 4, 5, 6):
        for mask in _masks(2, seq):
            x = batch(2, seq)
            torch.testing.assert_close(module(x, mask), eager(x, mask), rtol=1e-11, atol=0)
    # Two of the first size, two for all others.
    assert num_compiled(module) == 4


@pytest.mark.slow
def test_a_number_that_keeps_changing_is_heard() -> None:
    eager = Deciding()
    eager.calls.fill_(5)
    module = compiled(lambda: copy.deepcopy(eager))
    mask = _masks(2, 1)[0]

    def call(length: int) -> None:
        x, lengths = batch(2, 1), torch.tensor([1, length])
        torch.testing.assert_close(module(x, mask, lengths), eager(x, mask, lengths))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (1, 2, 3, 4):
            call(length)
    with pytest.warns(UserWarning, match=r"5 programs now .*lengths\.max\(\).* -> 4, then .* -> 5"):
        call(5)


def test_plan_says_what_was_decided() -> None:
    module = compiled(Deciding, example_inputs=((batch(2, 3), _masks(2, 3)[0]), {}))
    assert [note for note in module.plan.notes if "if not mask.any():" in note] == [
        note for note in module.plan.notes if note.endswith("-> False")
    ]
    assert not module.calls  # nothing ran


ASKED: dict[str, Callable[[Tensor], bool]] = {
    "grad": lambda y: torch.is_grad_enabled(),
    "inference": lambda y: torch.is_inference_mode_enabled(),
    "requires_grad": lambda y: y.requires_grad,
    "grad_fn": lambda y: y.grad_fn is not None,
}


class Asking(nn.Module):
    """Scales by what its caller's modes are."""

    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        # What the model sets itself is no mode of its caller, and that of a parameter is none.
        with torch.no_grad():
            assert not torch.is_grad_enabled()
            assert self.linear.weight.requires_grad
        return y * (2 if self.ask(y) else 3)


@pytest.mark.parametrize("asked", ASKED)
def test_modes_of_the_caller(asked: str) -> None:
    eager = Asking(ASKED[asked])
    module = compiled(lambda: copy.deepcopy(eager))
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with mode():
            torch.testing.assert_close(module(batch()), eager(batch()), rtol=1e-12, atol=0)
    assert num_compiled(module) == 2


SET_BY_MODEL: dict[str, Callable[[Tensor], Any]] = {
    "enable_grad": lambda x: torch.enable_grad(),
    "set_grad_enabled": lambda x: torch.set_grad_enabled(x.shape[0] > 1),
    "set_grad_enabled(False)": lambda x: torch.set_grad_enabled(False),
}


class Setting(nn.Module):
    """Asks for the mode that it has set itself, then for its caller's."""

    def __init__(self, mode: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode(x):
            y: Tensor = self.linear(x) * (2 if torch.is_grad_enabled() else 3)
        return y * (5 if torch.is_grad_enabled() else 7)


@pytest.mark.parametrize("how", SET_BY_MODEL)
def test_modes_that_the_model_sets(how: str) -> None:
    eager = Setting(SET_BY_MODEL[how])
    module = compiled(lambda: copy.deepcopy(eager))
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(module(batch()), eager(batch()), rtol=1e-12, atol=0)


def test_modes_that_no_line_of_the_model_asks_for() -> None:
    module = compiled(lambda: Asking(lambda y: False))
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            module(batch())
    assert num_compiled(module) == 1


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a branch": lambda x: x * (2 if x.is_contiguous() else 3),
    "a branch on a view": lambda x: x * (2 if x.mT.is_contiguous() else 3),
    "a stride": lambda x: x * x.stride(0),
    "by place": lambda x: x + x.as_strided((1, 3, WIDTH), (0, WIDTH, 1)),
}


class Placed(nn.Module):
    """Reads how its input lies in memory."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3, dtype=torch.float64)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.function(x))


@pytest.mark.filterwarnings("ignore:every size of the inputs")  # as_strided
@pytest.mark.parametrize("case", slow_but(("by place",), LAYOUTS))
def test_layouts_of_inputs(case: str) -> None:
    eager = Placed(LAYOUTS[case])
    module = compiled(lambda: copy.deepcopy(eager))
    plain, turned = batch(2, 3), batch(3, 2).transpose(0, 1)
    for x in (plain, turned, plain, turned, batch(4, 3), batch(3, 5).transpose(0, 1)):
        torch.testing.assert_close(module(x), eager(x), rtol=1e-12, atol=0)
