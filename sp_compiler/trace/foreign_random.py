"""Random numbers that a forward does not draw from PyTorch, and seeds that it sets.

A capture sees the number that ``random.random()`` returns, not the call: every step would compute
with the same number. If anything is drawn, the forward is captured three more times, with
generators whose next numbers are the smallest and the largest possible ones, and one in the middle
(for a choice among three, the first and the last may give the same graph). If the graphs are equal,
they do not depend on the numbers. Seeds that a forward sets are refused: the random numbers of a
compiled forward come from a counter, which such a seed does not set.
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
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import nn

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.warn import is_library, line_text, user_line
from sp_compiler.trace.tracer_patches import asked_by_model

# The generator whose methods are the functions of the module.
_PYTHON = random.getstate.__self__  # type: ignore[attr-defined]  # a bound method
NextNumbers = Literal["smallest", "middle", "largest"]
NEXT_NUMBERS: tuple[NextNumbers, ...] = get_args(NextNumbers)
_WORDS = {"smallest": 0, "middle": 0xFC02C9A7, "largest": 0x12DD9BB3}
"""Words in the state of a Mersenne Twister that it returns as 0, 0x7fff0001 and 0xffffffff.

The one in the middle, an odd number with few bits set at either end, is never rejected by a choice
among several, whether by its first bits (Python) or its last (NumPy), and is not 0.
"""
_NUM_WORDS, _NUM_EQUAL = 624, 400
"""Not all words are equal: loops that reject a number, as for a normal distribution, must end, and
a state of only zeros would never yield another number."""
_RETURNED = {"smallest": 0, "middle": 0x7FFF0001, "largest": 0xFFFFFFFF}
_PCG_MULTIPLIER = 0x2360ED051FC65DA44385DF649FCCF645
"""Multiplier of ``numpy.random.PCG64``: O'Neill, "PCG" (2014), section 6.3.4, for 128 bits."""
_NUM_SEEDS = 1000
"""Number of seeds tried for other generators; those with the nearest first numbers are used."""


class ForeignDraw(Exception):
    """The states of ``generators`` have changed while a forward was captured.

    Attributes:
        lines: the lines of the forward that changed them, by generator.
    """

    def __init__(self, generators: dict[str, Any]) -> None:
        super().__init__(f"draws from {', '.join(generators)}")
        self.generators = generators
        self.lines: dict[str, str] = {}

    @contextlib.contextmanager
    def numbers(self, which: NextNumbers) -> Iterator[None]:
        """Context in which the next numbers of each generator are about the smallest, for example.

        One number would not be enough: with layers that are dropped with increasing probability,
        the first may never be dropped. Generators other than the Mersenne Twister have only one
        such number.
        """
        states = {name: _state(each) for name, each in self.generators.items()}
        for each in self.generators.values():
            _put(each, _state_before(each, which))
        try:
            yield
        finally:
            for name, state in states.items():
                _put(self.generators[name], state)

    def refusal(self) -> UnsupportedError:
        """Return the error for a graph that depends on the numbers."""
        name = next(iter({**self.lines, **self.generators}))
        line = f": {self.lines[name]}" if name in self.lines else ""
        return UnsupportedError(
            f"the forward draws from {name}, and the compiled model would compute with the same "
            f"number in every call{line}; draw with torch (torch.rand), or outside of the forward "
            "and pass it as an argument"
        )


def drawing_from_torch(
    model: nn.Module, forward: Callable[..., Any], drawn: ForeignDraw | None
) -> Callable[..., Any]:
    """Return ``forward`` of ``model``, which raises an error where random numbers may be lost.

    Args:
        model: a model, which may have its own generators.
        forward: its forward.
        drawn: the error of a first capture; the lines that draw are now noted in it.

    Raises:
        ForeignDraw: numbers were drawn from a generator of Python or NumPy, and ``drawn`` is
            ``None``.
        UnsupportedError: a line outside of PyTorch sets PyTorch's seed.
    """

    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        with _torch_seeds_refused():
            if drawn is not None:
                return _traced(functools.partial(forward, *args, **kwargs), drawn)
            generators = _generators(model)
            before = {name: _state(each) for name, each in generators.items()}
            result = forward(*args, **kwargs)
        changed = {n: each for n, each in generators.items() if _state(each) != before[n]}
        if changed:
            raise ForeignDraw(changed)
        return result

    return watched


def _generators(model: nn.Module) -> dict[str, Any]:
    """Return the generators that a forward may draw from, by a name for messages."""
    found: dict[str, Any] = {"Python's random": _PYTHON}
    kinds: tuple[type, ...] = (random.Random,)
    numbers = sys.modules.get("numpy.random")  # if anything has imported it
    if numbers is not None:
        found["numpy.random"] = numbers.mtrand._rand
        kinds += (numbers.Generator, numbers.RandomState)
    modules = list(model.named_modules())
    # Globals of the files that define the forwards.
    forwards = {type(module): type(module).forward for _, module in modules}.values()
    files = {id(each): each for each in (getattr(f, "__globals__", {}) for f in forwards)}.values()
    for path, names in [("", each) for each in files] + [(path, vars(m)) for path, m in modules]:
        for name, value in names.items():
            # The system's generator has no state.
            if isinstance(value, kinds) and not isinstance(value, random.SystemRandom):
                found[f"{type(value).__name__} {'.'.join(filter(None, (path, name)))}"] = value
    return found


def _state(generator: Any) -> bytes:
    if isinstance(generator, random.Random):
        return pickle.dumps(generator.getstate())
    # A numpy.random.Generator has a bit_generator, a RandomState has not.
    bits = getattr(generator, "bit_generator", None)
    return pickle.dumps(generator.get_state() if bits is None else bits.state)


def _put(generator: Any, state: bytes) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))


def _state_before(generator: Any, which: NextNumbers) -> bytes:
    """Return a state of the generator from which such numbers follow."""
    others = random.Random(which)  # differs by kind; drawn after rejected numbers
    words = [_WORDS[which]] * _NUM_EQUAL
    words += [others.getrandbits(32) for _ in range(_NUM_WORDS - _NUM_EQUAL)]
    state = pickle.loads(_state(generator))
    match state:
        case (version, (*_, _), _) if type(generator) is random.Random:
            return pickle.dumps((version, (*words, 0), None))
        case ("MT19937" as kind, *_):
            return pickle.dumps((kind, words, 0, 0, 0.0))
        case {"bit_generator": "MT19937"}:
            return pickle.dumps({**state, "state": {"key": words, "pos": 0}})
        case {"bit_generator": "PCG64", "state": {"inc": step}}:
            # It steps, and returns a combination of the halves of its new state: the lower half if,
            # as in ``after``, the upper one is 0.
            after = _RETURNED[which] << 32 | _RETURNED[which]
            before = (after - step) * pow(_PCG_MULTIPLIER, -1, 1 << 128) % (1 << 128)
            return pickle.dumps({**state, "state": {"state": before, "inc": step}, "has_uint32": 0})
    bits = getattr(generator, "bit_generator", None)

    def seeded(seed: int) -> Any:
        if isinstance(generator, random.Random):
            return random.Random(seed)
        return type(generator)(seed if bits is None else type(bits)(seed))

    wanted = NEXT_NUMBERS.index(which) / 2
    return _state(seeded(min(range(_NUM_SEEDS), key=lambda s: abs(seeded(s).random() - wanted))))


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

    # torch internals: torch.manual_seed, torch.seed and torch.set_rng_state, which a graph does not
    # show.
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


def _traced(forward: Callable[[], Any], drawn: ForeignDraw) -> Any:
    """Run ``forward``; note the lines outside of libraries that draw."""
    states = {name: _state(each) for name, each in drawn.generators.items()}
    latest: tuple[FrameType | None, int] = None, 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal latest
        # Most frames are in libraries; a user knows the model's line that calls them.
        if _is_others(frame.f_code.co_filename):
            return None
        # C functions do not appear in the trace: the line before the one traced now has drawn.
        for name, each in drawn.generators.items():
            if name not in drawn.lines and _state(each) != states[name] and latest[0] is not None:
                drawn.lines[name] = line_text(latest[0].f_code.co_filename, latest[1])
        runs: FrameType | None = frame
        if event == "return":
            runs = frame.f_back
            while runs is not None and _is_others(runs.f_code.co_filename):
                runs = runs.f_back
        latest = runs, 0 if runs is None else runs.f_lineno
        return trace

    known = sys.gettrace()
    sys.settrace(trace)
    try:
        return forward()
    finally:
        sys.settrace(known)


@functools.cache
def _is_others(filename: str) -> bool:
    """Return whether this file belongs to a library: PyTorch, this package or Python's own."""
    is_standard = filename.startswith(os.path.dirname(random.__file__))
    return is_library(filename) or (is_standard and "-packages" not in filename)
