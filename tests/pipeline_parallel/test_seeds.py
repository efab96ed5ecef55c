"""Seeds of the microbatches of a step, on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from sp_compiler.ops.counter import call_seed, draw_seed
from sp_compiler.pipeline_parallel.ranks import StageRanks


def _seeds(part: int) -> list[int]:
    """Of three microbatches, on the rank that reads this part of the data."""
    ranks = cast(Any, object.__new__(StageRanks))
    group = SimpleNamespace(process_group=None, data=SimpleNamespace(rank=part))
    ranks._state = SimpleNamespace(group=group, device=lambda: torch.device("cpu"))
    ranks._axis = SimpleNamespace(size=1)
    torch.manual_seed(5)
    return [int(seed) for seed in ranks.seeds(3)]


def test_each_part_of_the_data_has_its_own_masks() -> None:
    """As a module without stages has them; equal masks on different samples are correlated."""
    torch.manual_seed(5)
    drawn = [draw_seed() for _ in range(3)]
    assert _seeds(0) == [int(seed) for seed in drawn]
    assert _seeds(2) == [int(call_seed(seed, 2)) for seed in drawn]
    assert len({*_seeds(0), *_seeds(1), *_seeds(2)}) == 9
