"""Random numbers that a forward does not draw from PyTorch, and seeds that it sets.

A capture sees the number that ``random.random()`` returns, not the call: every step would compute
with the same one. And the numbers that a compiled forward draws come from a counter, which no seed
of the forward's own sets.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import nn

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.warn import is_library, line_text, user_line
from sp_compiler.trace.tracer_patches import asked_by_model

# The generator whose methods are the functions of the module.
_PYTHON = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method


class ForeignDraw(Exception):
    """A forward has changed the states of ``generators``: it is to be captured again, traced."""

    def __init__(self, generators: dict[str, Any]) -> None:
        super().__init__(f"draws from {', '.join(generators)}")
        self.generators = generators


def drawing_from_torch(
    model: nn.Module, forward: Callable[..., Any], traced: ForeignDraw | None
) -> Callable[..., Any]:
    """Return ``forward`` of ``model``, which raises an error where random numbers would be lost.

    What it draws after a seed of its own is the same in every call, and may become a constant.

    Args:
        model: has generators of its own.
        forward: its forward.
        traced: what a first capture has raised; the lines that draw are looked for, which is slow.

    Raises:
        ForeignDraw: not ``traced``, and something draws from a generator of Python's or NumPy's.
        UnsupportedError: a line outside of PyTorch draws from one, or sets the seed of PyTorch's.
    """

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _torch_seeds_refused(), _seeds_noted() as seeded:
            if traced is not None:
                return _traced(functools.partial(forward, *args, **kwargs), traced, seeded)
            generators = _generators(model)
            before = {name: _state(each) for name, each in generators.items()}
            result = forward(*args, **kwargs)
        drawn = {
            name: each
            for name, each in generators.items()
            if id(each) not in seeded and _state(each) != before[name]
        }
        if drawn:
            raise ForeignDraw(drawn)
        return result

    return watched


def _generators(model: nn.Module) -> dict[str, Any]:
    """Return the generators that a forward may draw from, by what to call them."""
    found: dict[str, Any] = {"Python's random": _PYTHON}
    kinds: tuple[type, ...] = (random.Random,)
    numbers = _random_of_numpy()
    if numbers is not None:
        found["numpy.random"] = _of_numpy(numbers)
        kinds += (numbers.Generator, numbers.RandomState)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, kinds):
                found[f"{type(value).__name__} {'.'.join(filter(None, (path, name)))}"] = value
    return found


def _random_of_numpy() -> Any:
    """Return the module, or ``None`` if nothing has imported it."""
    return sys.modules.get("numpy.random")


def _of_numpy(numbers: Any) -> Any:
    """Return the generator whose methods are the functions of the module."""
    return numbers.mtrand._rand


def _state(generator: Any) -> bytes:
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    # Of numpy.random.Generator, else of RandomState.
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


@contextlib.contextmanager
def _seeds_noted() -> Iterator[set[int]]:
    """Context that yields the ``id`` of each generator whose seed has been set by now."""
    seeded: set[int] = set()

    def noting(generator: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def setting(*args: Any, **kwargs: Any) -> Any:
            seeded.add(id(generator))
            return function(*args, **kwargs)

        return setting

    with contextlib.ExitStack() as stack:
        seed, setstate = noting(_PYTHON, random.seed), noting(_PYTHON, random.setstate)
        stack.enter_context(mock.patch.object(random, "seed", seed))
        stack.enter_context(mock.patch.object(random, "setstate", setstate))
        numbers = _random_of_numpy()
        if numbers is not None:
            seed = noting(_of_numpy(numbers), numbers.seed)
            set_state = noting(_of_numpy(numbers), numbers.set_state)
            stack.enter_context(mock.patch.object(numbers, "seed", seed))
            stack.enter_context(mock.patch.object(numbers, "set_state", set_state))
        yield seeded


@contextlib.contextmanager
def _torch_seeds_refused() -> Iterator[None]:
    def refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def setting(*args: Any, **kwargs: Any) -> Any:
            if asked_by_model():
                raise UnsupportedError(
                    f"the forward calls torch.{name}, but the random numbers of a compiled model "
                    f"come from a counter: {user_line()}; draw numbers that are to stay the same "
                    "outside of the forward, and keep them in a buffer"
                )
            return function(*args, **kwargs)

        return setting

    # torch internals: torch.manual_seed, torch.seed and torch.set_rng_state, of which a graph shows
    # nothing.
    manual_seed = refusing("manual_seed", torch.manual_seed)
    seed = refusing("seed", torch.seed)
    set_rng_state = refusing("set_rng_state", torch.set_rng_state)
    with (
        mock.patch.object(torch, "manual_seed", manual_seed),
        mock.patch.object(torch, "seed", seed),
        mock.patch.object(torch, "set_rng_state", set_rng_state),
        mock.patch.object(torch.random, "manual_seed", manual_seed),
        mock.patch.object(torch.random, "seed", seed),
        mock.patch.object(torch.random, "set_rng_state", set_rng_state),
    ):
        yield


def _traced(forward: Callable[[], Any], draw: ForeignDraw, seeded: set[int]) -> Any:
    """Run ``forward``; raise an error if a line of its own draws.

    PyTorch may draw for itself, and some numbers are drawn once, as in eager code.
    """
    lines: dict[str, str] = {}
    states = {name: _state(each) for name, each in draw.generators.items()}
    latest: tuple[FrameType | None, int] = None, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal latest
        # A function of C shows in no trace: what ran before the first event behind it has drawn.
        for name, each in draw.generators.items():
            if name not in lines and (state := _state(each)) != states[name]:
                states[name] = state
                if id(each) not in seeded and (line := _own_line(*latest)):
                    lines[name] = line
        runs = frame.f_back if event == "return" else frame
        latest = runs, 0 if runs is None else runs.f_lineno
        return trace

    known = sys.gettrace()
    sys.settrace(trace)
    try:
        result = forward()
    finally:
        sys.settrace(known)
    for name, line in lines.items():
        raise UnsupportedError(
            f"the forward draws from {name}, and the compiled model would compute with the same "
            f"number in every call: {line}; draw with torch (torch.rand), or outside of the "
            "forward and pass it as an argument"
        )
    return result


def _own_line(frame: FrameType | None, number: int) -> str:
    """Return the line that ran, or that called Python's own library; "" if it is PyTorch's."""
    while frame is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
        number = 0 if frame is None else frame.f_lineno
    if frame is None or is_library(frame.f_code.co_filename):
        return ""
    return line_text(frame.f_code.co_filename, number)


def _is_standard(filename: str) -> bool:
    """Whether this is a file of Python's own library, such as random.py."""
    return filename.startswith(os.path.dirname(random.__file__)) and "-packages" not in filename
