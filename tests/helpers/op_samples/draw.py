"""Random sizes and tensors for calls of operators."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]
Args = list[Any]


class Draw:
    """Random sizes, most of them multiples of the number of ranks, and tensors."""

    def __init__(self, seed: str, world_size: int) -> None:
        number = zlib.crc32(seed.encode())
        self.random = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.world_size = world_size

    def size(self) -> int:
        return self.random.choice((1, 5, *(self.world_size * n for n in (1, 2, 3, 4, 6))))

    def shape(self, lowest: int = 1, highest: int = 3) -> Shape:
        return tuple(self.size() for _ in range(self.random.randint(lowest, highest)))

    def narrower(self, shape: Shape) -> Shape:
        """Broadcasts to ``shape``."""
        kept = self.random.choice((0, 0, *range(len(shape))))
        return tuple(size if self.random.random() < 0.8 else 1 for size in shape[kept:])

    def subset(self, count: int) -> list[int]:
        """Some of ``range(count)``, at least one, counted from either end."""
        found = self.random.sample(range(count), self.random.randint(1, count))
        return [number - count * self.random.randint(0, 1) for number in found]

    def dim(self, rank: int) -> int:
        return self.random.randrange(-rank, rank)

    def parts(self, size: int) -> list[int]:
        """Sizes that add up to ``size``."""
        cut = self.random.randint(1, max(1, size // self.world_size)) * self.world_size
        return [cut, size - cut] if cut < size else [size]

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return self.numbers(*shape) > 0

    def ids(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator)


Sample = Callable[[Draw], Args]
"""Arguments of one random call; a dict at the end has those by name."""
