"""Random numbers that a capture would make constants, and seeds that it would lose."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.trace.export import capture

OF_THIS_FILE = np.random.default_rng(0)


class Drawing(nn.Module):
    """Scales by what ``draw`` returns; has generators of its own."""

    def __init__(self, draw: Callable[[Drawing], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.own = random.Random(0)
        self.of_numpy = np.random.default_rng(0)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.draw(self)


def _shuffled(model: Drawing) -> float:
    numbers = [1.0, 2.0, 3.0]
    random.shuffle(numbers)
    return numbers[0]


def _seeded(model: Drawing) -> float:
    random.seed(3)
    np.random.seed(4)
    return random.random() + float(np.random.rand())


def _put_back(model: Drawing) -> float:
    state = random.getstate()
    random.seed(3)
    number = random.random()
    random.setstate(state)
    return number


DRAWN: dict[str, tuple[Callable[[Drawing], Any], str]] = {
    "random": (lambda model: random.random(), "Python's random,.* lambda model: random.random()"),
    "shuffle": (_shuffled, "Python's random,.* random.shuffle"),
    "numpy": (lambda model: float(np.random.rand()), r"numpy\.random,.*float\(np"),
    "its own": (lambda model: model.own.random(), r"Random own,.* model\.own\.random"),
    "a constant tensor": (
        lambda model: torch.from_numpy(np.random.rand(4)).float(),
        r"numpy\.random,.*from_numpy",
    ),
    "numpy, its own": (
        lambda model: model.of_numpy.random(),
        r"Generator of_numpy,.* model\.of_numpy\.random",
    ),
    "the file's": (
        lambda model: float(OF_THIS_FILE.random() < 1e-9),
        r"Generator OF_THIS_FILE,.* float\(OF_THIS_FILE",
    ),
}


@pytest.mark.parametrize("how", DRAWN)
def test_numbers_that_would_stay_the_same_are_refused_with_their_line(how: str) -> None:
    draw, said = DRAWN[how]
    with pytest.raises(UnsupportedError, match=f"the forward draws from {said}"):
        capture(Drawing(draw), (torch.randn(2, 4),), {})


def _dropped_now_and_then(number: Callable[[], float]) -> Callable[[Drawing], float]:
    """As layers are whose probability to be dropped grows from 0."""
    return lambda model: 2.0 * sum(number() < rate for rate in (0.0, 0.001, 0.002))


CHOICES: dict[str, Callable[[Drawing], float]] = {
    "the second": _dropped_now_and_then(random.random),
    "the second, numpy": _dropped_now_and_then(np.random.rand),
    "the middle": lambda model: random.choice([2.0, 3.0, 2.0]),
    "half, numpy": lambda model: float(np.random.randint(2)),
    "the middle, numpy": lambda model: float(model.of_numpy.integers(0, 3) == 1),
    "normal, numpy": lambda model: float(np.random.randn() < -3),
}


@pytest.mark.parametrize("how", CHOICES)
def test_numbers_after_the_first_and_between_the_extremes_are_refused(how: str) -> None:
    with pytest.raises(UnsupportedError, match="the forward draws from"):
        capture(Drawing(CHOICES[how]), (torch.randn(2, 4),), {})


@pytest.mark.parametrize("draw", [_seeded, _put_back, lambda model: random.Random(5).random()])
def test_numbers_that_are_the_same_in_every_call_are_constants(
    draw: Callable[[Drawing], float],
) -> None:
    model, x = Drawing(draw), torch.randn(2, 4)
    number = draw(model)
    graph = capture(model, (x,), {}).module.graph
    assert number == draw(model)
    assert str(number) in str(graph)


_ONCE: dict[str, float] = {}


def test_a_number_that_is_drawn_once_is_a_constant() -> None:
    """In eager code as well, from the second call on; what the forward writes is written once."""

    def draw(model: Drawing) -> float:
        model.calls.add_(1)
        if not _ONCE:
            _ONCE["number"] = random.random()
        return _ONCE["number"]

    graph = capture(Drawing(draw), (torch.randn(2, 4),), {}).module.graph
    assert str(_ONCE["number"]) in str(graph)
    assert str(graph).count("aten.add") == 1


def _unused(model: Drawing) -> float:
    return 2.0 if random.random() < 0.5 and not model.training else 1.0


def _logged(model: Drawing) -> float:
    if random.random() < 0.5 and np.random.rand() < 0.5:
        model.noted = 1
    return 1.0


@pytest.mark.parametrize("draw", [_unused, _logged])
def test_numbers_that_change_no_graph_may_be_drawn(draw: Callable[[Drawing], float]) -> None:
    """As of layers that are dropped with probability 0; the generators go on as in eager code."""
    model, x = Drawing(draw), torch.randn(2, 4)
    random.seed(1)
    capture(model, (x,), {})
    after = random.getstate()
    random.seed(1)
    model(x)
    assert random.getstate() == after


def test_draws_of_another_thread_are_not_the_forwards() -> None:
    stops = threading.Event()

    def draw() -> None:
        while not stops.is_set():
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        capture(Drawing(lambda model: 1.0), (torch.randn(2, 4),), {})
    finally:
        stops.set()
        thread.join()


def test_a_generator_of_the_systems_has_no_state() -> None:
    model = Drawing(lambda model: 1.0)
    model.own = random.SystemRandom()
    capture(model, (torch.randn(2, 4),), {})


SEEDING: dict[str, Callable[[], object]] = {
    "manual_seed": lambda: torch.manual_seed(0),
    "seed": lambda: torch.random.seed(),
    "set_rng_state": lambda: torch.set_rng_state(torch.get_rng_state()),
}


@pytest.mark.parametrize("name", SEEDING)
def test_seeds_of_torch_are_refused_with_their_line(name: str) -> None:
    def draw(model: Drawing) -> float:
        SEEDING[name]()
        return 1.0

    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=rf"calls torch\.{name}, but .*test_foreign_random"):
        capture(Drawing(draw), (torch.randn(2, 4),), {})
    torch.set_rng_state(before)


def test_torchs_own_code_may_set_seeds() -> None:
    """A block of ``fork_rng`` ends with ``set_rng_state``."""

    def draw(model: Drawing) -> float:
        with torch.random.fork_rng():
            return 2.0

    capture(Drawing(draw), (torch.randn(2, 4),), {})
