"""Random small models of operators that have rules, as data that a module runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One operator: on which values so far, with which options; ``params`` are shapes."""

    name: str
    values: tuple[int, ...]
    options: tuple[Any, ...] = ()
    params: tuple[Shape, ...] = ()


@dataclass
class Recipe:
    """Operations of a model on its input (batch, sequence, width)."""

    batch: int
    seq: int
    width: int
    steps: list[Step] = field(default_factory=list)

    def __repr__(self) -> str:
        lines = [
            f"{i + 1}: {s.name}{s.values} {s.options} {s.params}" for i, s in enumerate(self.steps)
        ]
        return "\n".join([f"Recipe of ({self.batch}, {self.seq}, {self.width})", *lines])


class RandomModel(nn.Module):
    """Embeds ids, runs the steps and sums what no step has used to a loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        self.embedding = nn.Embedding(12, recipe.width)
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, generator=generator) / math.sqrt(shape[-1]))
            for step in recipe.steps
            for shape in step.params
        )

    def forward(self, ids: Tensor) -> Tensor:
        values, weights = [self.embedding(ids)], iter(self.weights)
        for step in self.recipe.steps:
            operands = [values[index] for index in step.values]
            values.append(
                OPERATORS[step.name](
                    *operands, *(next(weights) for _ in step.params), *step.options
                )
            )
        used = {index for step in self.recipe.steps for index in step.values}
        unused = [value for index, value in enumerate(values) if index not in used]
        return sum(
            (value.square().mean() + value.sin().sum() / 7 for value in unused), torch.zeros(())
        )


def _fused(x: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """One product, cut in parts of one size, multiplied."""
    first, *others = F.linear(x, weight).split(list(sizes), -1)
    for other in others:
        first = F.silu(first) * other
    return first


def _attention(x: Tensor, weight: Tensor, heads: int) -> Tensor:
    b, s, _ = x.shape
    q, k, v = F.linear(x, weight).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = (q @ k.transpose(-1, -2)).softmax(-1)
    return (scores @ v).transpose(1, 2).reshape(b, s, -1)


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear": F.linear,
    "biased": F.linear,
    "fused": _fused,
    "attention": _attention,
    "matmul": lambda x, y: x @ y.transpose(-1, -2) / x.shape[-1],
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "scale": lambda x, w: x * w,
    "shift": lambda x, w: x + w,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "half": lambda x: x / 2 - 1,
    "softmax": lambda x, dim: x.softmax(dim),
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "rms_norm": lambda x, w: F.rms_norm(x, w.shape, w),
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep) / 4,
    "mean": lambda x, dims, keep: x.mean(dims, keepdim=keep),
    "amax": lambda x, dim, keep: x.amax(dim, keepdim=keep),
    "split": lambda x, dim, size: torch.cat(x.split(size, dim)[::-1], dim),
    "chunk": lambda x, dim: x.chunk(2, dim)[0] * x.chunk(2, dim)[1],
    "cat": lambda x, y, dim: torch.cat([x, y], dim),
    "stack": lambda x, y, dim: torch.stack([x, y], dim),
    "slice": lambda x, dim, start: x.narrow(dim, start, x.shape[dim] - start),
    "select": lambda x, dim: x.select(dim, -1),
    "flip": lambda x, dim: x.flip(dim),
    "roll": lambda x, dim: x.roll(1) if dim is None else x.roll(1, dim),
    "cumsum": lambda x, dim: x.cumsum(dim) / x.shape[dim],
    "pad": lambda x, pad: F.pad(x, pad),
    "tril": lambda x: x.tril(),
    "mask": lambda x, value: x.masked_fill(torch.ones_like(x, dtype=torch.bool).tril(), value),
    "transpose": lambda x, a, b: x.transpose(a, b),
    "permute": lambda x, order: x.permute(order),
    "unsqueeze": lambda x, dim: x.unsqueeze(dim),
    "squeeze": lambda x: x.squeeze(),
    "reshape": lambda x, shape: x.reshape(shape),
    "flatten": lambda x, dim: x.flatten(dim, dim + 1),
    "unflatten": lambda x, dim, sizes: x.unflatten(dim, sizes),
    "expand": lambda x, size: x.unsqueeze(0).expand(size, *x.shape),
    "broadcast": lambda x, size: torch.broadcast_to(x, (size, *x.shape)),
}
_SIZES = (1, 2, 3, 4, 6, 8, 12)
_LARGEST = 3000


@st.composite
def recipes(draw: st.DrawFn, most: int = 10) -> Recipe:
    """Recipes of up to ``most`` steps on values of at most five dims."""
    recipe = Recipe(
        draw(st.sampled_from((1, 2, 3, 4))),
        draw(st.sampled_from((1, 2, 4, 5, 6))),
        draw(st.sampled_from((4, 8, 12, 24))),
    )
    shapes: list[Shape] = [(recipe.batch, recipe.seq, recipe.width)]
    for _ in range(draw(st.integers(2, most))):
        # Mostly the latest value, so that the graph is deep.
        index = draw(st.sampled_from([*[len(shapes) - 1] * 4, *range(len(shapes))]))
        step = draw(_step(index, shapes))
        shape = None if step is None else _result(step, shapes)
        if (
            step is not None
            and shape is not None
            and len(shape) <= 5
            and 0 < math.prod(shape) <= _LARGEST
        ):
            recipe.steps.append(step)
            shapes.append(shape)
    return recipe


def _result(step: Step, shapes: list[Shape]) -> Shape | None:
    """Shape of what a step gives; ``None`` if its operands do not go together."""
    operands = [torch.empty(shapes[index], device="meta") for index in step.values]
    params = [torch.empty(shape, device="meta") for shape in step.params]
    try:
        return tuple(OPERATORS[step.name](*operands, *params, *step.options).shape)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class _Drawn:
    """Random choices of every step, whether its operator uses them or not.

    Attributes:
        index: the value that the step works on, and its ``shape``.
        dim: one of its dims, counted from either end.
        other: another value.
        size: of a new dim.
    """

    draw: st.DrawFn
    index: int
    shape: Shape
    dim: int
    other: int
    size: int
    keep: bool

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def last(self) -> int:
        return self.shape[-1]

    def one_of(self, *values: Any) -> Any:
        return self.draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))


@st.composite
def _step(draw: st.DrawFn, index: int, shapes: list[Shape]) -> Step | None:
    shape = shapes[index]
    rank, name = len(shape), draw(st.sampled_from(sorted(OPERATORS)))
    if not rank:
        return None
    drawn = _Drawn(
        draw,
        index,
        shape,
        dim=draw(st.integers(-rank, rank - 1)),
        other=draw(st.sampled_from(range(len(shapes)))),
        size=draw(st.sampled_from(_SIZES)),
        keep=draw(st.booleans()),
    )
    if rank < _LEAST_RANK.get(name, 1) or rank > _MOST_RANK.get(name, rank):
        return None
    values = (index, drawn.other) if name in _OF_TWO else (index,)
    options = _OPTIONS[name](drawn) if name in _OPTIONS else ()
    params = _PARAMS[name](drawn, *options) if name in _PARAMS else ()
    return Step(name, values, options, params)


# Of two values; and how many dims an operator needs.
_OF_TWO = ("add", "mul", "matmul", "cat", "stack")
_LEAST_RANK = {"attention": 3, "mask": 2}
_MOST_RANK = {"attention": 3}


def _dim(drawn: _Drawn) -> tuple[int]:
    return (drawn.dim,)


def _dims(drawn: _Drawn) -> tuple[Any, ...]:
    dims = st.lists(st.sampled_from(range(drawn.rank)), min_size=1, unique=True)
    return tuple(drawn.draw(dims)), drawn.keep


def _pads(drawn: _Drawn) -> tuple[Any, ...]:
    pads = st.sampled_from(((0, 0), (1, 2), (1, -1), (0, 1)))
    pairs = drawn.draw(st.lists(pads, min_size=1, max_size=drawn.rank))
    return (tuple(n for pair in pairs for n in pair),)


def _parts(drawn: _Drawn) -> tuple[Any, ...]:
    part = drawn.one_of(2, 3, 4)
    return drawn.dim, drawn.one_of((part, -1), (-1, part))


@st.composite
def _reshaped(draw: st.DrawFn, shape: Shape) -> Shape:
    """Another shape of as many elements."""
    found: list[int] = []
    rest = math.prod(shape)
    while rest > 1 and len(found) < 3:
        size = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        found.append(size)
        rest //= size
    return (*found, rest)


_OPTIONS: dict[str, Callable[[_Drawn], tuple[Any, ...]]] = {
    "fused": lambda drawn: ((drawn.size,) * drawn.number(2, 3),),
    "attention": lambda drawn: (drawn.one_of(2, 3, 4),),
    **dict.fromkeys(("cat", "stack", "softmax", "chunk", "select", "flip", "cumsum"), _dim),
    **dict.fromkeys(("sum", "mean"), _dims),
    "amax": lambda drawn: (drawn.dim, drawn.keep),
    "roll": lambda drawn: (drawn.one_of(None, drawn.dim),),
    "split": lambda drawn: (drawn.dim, drawn.size),
    "slice": lambda drawn: (drawn.dim, drawn.one_of(1, 2)),
    "pad": _pads,
    "mask": lambda drawn: (drawn.one_of(0.0, 0.5),),
    "transpose": lambda drawn: (drawn.dim, drawn.number(-drawn.rank, drawn.rank - 1)),
    "permute": lambda drawn: (tuple(drawn.draw(st.permutations(range(drawn.rank)))),),
    "unsqueeze": lambda drawn: (drawn.number(-drawn.rank - 1, drawn.rank),),
    "reshape": lambda drawn: (drawn.draw(_reshaped(drawn.shape)),),
    "flatten": lambda drawn: (drawn.number(0, max(0, drawn.rank - 2)),),
    "unflatten": _parts,
    **dict.fromkeys(("expand", "broadcast"), lambda drawn: (drawn.one_of(1, 2, 4),)),
}


def _broadcast_param(drawn: _Drawn) -> tuple[Shape, ...]:
    start = drawn.number(0, drawn.rank - 1)
    kept = tuple(n if drawn.draw(st.booleans()) else 1 for n in drawn.shape[start:-1])
    return ((*kept, drawn.last),)


# Shapes of the parameters of a step with these options.
_PARAMS: dict[str, Callable[..., tuple[Shape, ...]]] = {
    "linear": lambda drawn: ((drawn.size, drawn.last),),
    "biased": lambda drawn: ((drawn.size, drawn.last), (drawn.size,)),
    "fused": lambda drawn, sizes: ((sum(sizes), drawn.last),),
    "attention": lambda drawn, heads: ((3 * heads * 2, drawn.last),),
    **dict.fromkeys(("scale", "shift"), _broadcast_param),
    "layer_norm": lambda drawn: ((drawn.last,), (drawn.last,)),
    "rms_norm": lambda drawn: ((drawn.last,),),
}
