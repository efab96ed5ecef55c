"""Parameters that the first program does not use start from the same numbers on all ranks, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sp_compiler
from sp_compiler import RankMismatchError
from tests.helpers.grids import whole
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import batch, net


def _compiled(initial_weights: Any) -> Any:
    model = net()
    model.unused = nn.Linear(3, 2).double()
    nn.init.constant_(model.unused.weight, dist.get_rank())
    nn.init.constant_(model.unused.bias, 0)
    return sp_compiler.compile(model, tp=2, initial_weights=initial_weights)


def _started() -> None:
    module = _compiled("broadcast")
    module(batch())
    assert torch.equal(whole(module.unused.weight), torch.zeros(2, 3))
    with pytest.raises(RankMismatchError, match=r"'unused\.weight'"):
        _compiled("compare")(batch())


@pytest.mark.slow
def test_weights_that_no_call_used_yet() -> None:
    run_on_ranks(2, _started)
