"""Collectives of a step by axis, of which the other ranks exist in name only."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import sp_compiler
from tests.helpers import grids
from tests.helpers.fake_group import fake_group
from tests.helpers.slow import slow
from tests.models import zoo

_LAYERS = 2


def _planned(items: Any) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for item in items:
        counts["tp", item.kind.replace("_", "")] += item.count
    return counts


@pytest.mark.parametrize("name", [slow("llama"), "gpt2"])
def test_a_step_sends_what_is_planned_and_nothing_else(name: str) -> None:
    """Over "tp" as the placements are typed; over "dp_shard" each group of parameters by itself."""
    batch = zoo.inputs(name, batch=2, seq=8)
    with fake_group(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        module: Any = sp_compiler.compile(
            zoo.build(name, layers=_LAYERS), mesh=mesh, example_inputs=((), batch)
        )
        with grids.CollectivesByAxis(mesh) as forward:
            loss = zoo.loss_of(module(**batch))
        with grids.CollectivesByAxis(mesh) as backward:
            loss.backward()
        with module.no_sync(), grids.CollectivesByAxis(mesh) as accumulated:
            zoo.loss_of(module(**batch)).backward()
    blocks = [module.plan.block(call.block) for call in module.plan.calls]
    expected = _planned(item for block in blocks for item in block.forward)
    # The blocks, and the rest.
    expected["dp_shard", "allgather"] = _LAYERS + 1
    assert forward.counts == expected
    expected = _planned(item for block in blocks for item in block.backward)
    expected["dp_shard", "allgather"] = _LAYERS
    without_reduction = Counter(expected)
    expected["dp_shard", "reducescatter"] = _LAYERS + 1
    # Norms and biases.
    expected["tp", "allreduce"] += 1
    assert backward.counts == expected
    replicated = [p for p in module.parameters() if p.placements[-1].is_replicate()]
    own = sum(grids.local(parameter).numel() for parameter in replicated)
    # Of the shards that FSDP2 leaves on this rank, not of whole parameters.
    assert 2 * own == sum(parameter.numel() for parameter in replicated)
    assert expected["tp", "allreduce"] == 1
    assert backward.elements["tp", "allreduce"] == own
    assert accumulated.counts == forward.counts + without_reduction
