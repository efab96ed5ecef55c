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
    """What a model does to its input (batch, sequence, width)."""

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


@st.composite
def _step(draw: st.DrawFn, index: int, shapes: list[Shape]) -> Step | None:
    shape = shapes[index]
    rank, name = len(shape), draw(st.sampled_from(sorted(OPERATORS)))
    if not rank:
        return None
    dim = draw(st.integers(-rank, rank - 1))
    other = draw(st.sampled_from(range(len(shapes))))
    size = draw(st.sampled_from(_SIZES))
    last = shape[-1]
    keep = draw(st.booleans())
    if name == "linear":
        return Step(name, (index,), (), ((size, last),))
    if name == "biased":
        return Step(name, (index,), (), ((size, last), (size,)))
    if name == "fused":
        sizes = (size,) * draw(st.integers(2, 3))
        return Step(name, (index,), (sizes,), ((sum(sizes), last),))
    if name == "attention":
        heads = draw(st.sampled_from((2, 3, 4)))
        return Step(name, (index,), (heads,), ((3 * heads * 2, last),)) if rank == 3 else None
    if name in ("add", "mul", "matmul"):
        return Step(name, (index, other))
    if name in ("cat", "stack"):
        return Step(name, (index, other), (dim,))
    if name in ("scale", "shift"):
        start = draw(st.integers(0, rank - 1))
        param = tuple(n if draw(st.booleans()) else 1 for n in shape[start:-1])
        return Step(name, (index,), (), ((*param, last),))
    if name == "layer_norm":
        return Step(name, (index,), (), ((last,), (last,)))
    if name == "rms_norm":
        return Step(name, (index,), (), ((last,),))
    if name in ("sum", "mean"):
        dims = draw(st.lists(st.sampled_from(range(rank)), min_size=1, unique=True))
        return Step(name, (index,), (tuple(dims), keep))
    if name == "amax":
        return Step(name, (index,), (dim, keep))
    if name == "roll":
        return Step(name, (index,), (draw(st.sampled_from((None, dim))),))
    if name in ("softmax", "chunk", "select", "flip", "cumsum"):
        return Step(name, (index,), (dim,))
    if name == "split":
        return Step(name, (index,), (dim, size))
    if name == "slice":
        return Step(name, (index,), (dim, draw(st.sampled_from((1, 2)))))
    if name == "pad":
        pads = st.sampled_from(((0, 0), (1, 2), (1, -1), (0, 1)))
        pairs = draw(st.lists(pads, min_size=1, max_size=rank))
        return Step(name, (index,), (tuple(n for pair in pairs for n in pair),))
    if name == "mask":
        return Step(name, (index,), (draw(st.sampled_from((0.0, 0.5))),)) if rank > 1 else None
    if name == "transpose":
        return Step(name, (index,), (dim, draw(st.integers(-rank, rank - 1))))
    if name == "permute":
        return Step(name, (index,), (tuple(draw(st.permutations(range(rank)))),))
    if name == "unsqueeze":
        return Step(name, (index,), (draw(st.integers(-rank - 1, rank)),))
    if name == "reshape":
        return Step(name, (index,), (draw(_reshaped(shape)),))
    if name == "flatten":
        return Step(name, (index,), (draw(st.integers(0, max(0, rank - 2))),))
    if name == "unflatten":
        part = draw(st.sampled_from((2, 3, 4)))
        return Step(name, (index,), (dim, draw(st.sampled_from(((part, -1), (-1, part))))))
    if name in ("expand", "broadcast"):
        return Step(name, (index,), (draw(st.sampled_from((1, 2, 4))),))
    return Step(name, (index,))


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
