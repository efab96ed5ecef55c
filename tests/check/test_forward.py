"""The checks accept correct graphs and refuse every missing or misdirected conversion."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.fx import Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.placement import Placement
from sp_compiler.check import check_forward, check_partitioned
from sp_compiler.ir.fx import placements_of
from sp_compiler.ir.program import Program, Region
from sp_compiler.options import CompileOptions
from sp_compiler.passes.normalize import normalize
from sp_compiler.passes.outline import outline
from sp_compiler.passes.sharding.shard import shard
from sp_compiler.trace.export import capture
from tests.helpers.compiled_region import compile_region
from tests.helpers.fake_group import fake_group
from tests.helpers.sharded_regions import (
    BLOCKS,
    WORLD,
    conversions,
    copied,
    copied_graphs,
    drop,
    is_identity,
    misplace,
    sharded,
)
from tests.models import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

aten = torch.ops.aten

POLICIES = ("selective", "full")
SEQUENCE_PARALLEL = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
Mutation = Callable[[Node], object]
MUTATIONS: tuple[Mutation, ...] = (drop, misplace)


def check_compiled(region: Region, policy: str = "selective") -> None:
    compiled = compile_region(region, recompute=policy)
    check_partitioned(region, compiled.partitioned, compiled.joint.tangent_outputs, WORLD)


def refuses(check: Callable[..., object], *args: object) -> PlacementError | None:
    try:
        check(*args)
    except PlacementError as error:
        return error
    return None


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("block", BLOCKS)
def test_accepts_regions_sharded_by_hand(block: str, sequence_parallel: bool) -> None:
    region = BLOCKS[block](sequence_parallel)
    report = check_forward(region, WORLD)
    operators = [node for node in region.module.graph.nodes if node.op == "call_function"]
    assert report.checked == len(operators)
    trusted = {node.target for node, _ in report.trusted if node.target.namespace == "aten"}
    # Before torch 2.13 DTensor, which the checker asks, cannot shard a product of more than a batch
    # and two dims; the rule table's word is taken.
    assert not trusted or (
        torch.__version__ < "2.13" and trusted <= {torch.ops.aten.matmul.default}
    )
    for policy in POLICIES:
        check_compiled(region, policy)


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=["dropped", "misplaced"])
def test_refuses_a_sharded_region_with_a_broken_conversion(
    block: str, sequence_parallel: bool, mutate: Mutation
) -> None:
    region = BLOCKS[block](sequence_parallel)
    for index in range(len(conversions(region.module.graph))):
        broken = copied(region)
        node = conversions(broken.module.graph)[index]
        if mutate(node) is False:
            continue
        assert refuses(check_forward, broken, WORLD), f"forward check missed {node}"
        assert refuses(check_compiled, broken), f"final check missed {node}"


@SEQUENCE_PARALLEL
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mutate", MUTATIONS, ids=["dropped", "misplaced"])
def test_refuses_final_graphs_with_a_broken_conversion(
    block: str, sequence_parallel: bool, policy: str, mutate: Mutation
) -> None:
    region = BLOCKS[block](sequence_parallel)
    compiled = compile_region(region, recompute=policy)
    tangents = compiled.joint.tangent_outputs
    tried = 0
    for side in ("forward", "backward"):
        for index, original in enumerate(conversions(getattr(compiled.partitioned, side))):
            broken = copied_graphs(compiled.partitioned)
            node = conversions(getattr(broken, side))[index]
            if is_identity(original) or mutate(node) is False:
                continue
            tried += 1
            error = refuses(check_partitioned, region, broken, tangents, WORLD)
            assert error, f"missed {original} of {side}"
    assert tried >= 2 or mutate is misplace


@SEQUENCE_PARALLEL
def test_refuses_what_the_contract_of_the_region_does_not_say(sequence_parallel: bool) -> None:
    region = BLOCKS["mlp"](sequence_parallel)
    compiled = compile_region(region, recompute="selective")

    def check(changed: Region) -> PlacementError | None:
        tangents = compiled.joint.tangent_outputs
        return refuses(check_partitioned, changed, compiled.partitioned, tangents, WORLD)

    for index in range(len(region.input_placements)):
        for placement in region.input_placements:
            placements = list(region.input_placements)
            if placements[index] == placement:
                continue
            placements[index] = placement
            assert check(replace(region, input_placements=tuple(placements)))
    for text in {"R", "I", "P", "S(0)", "S(1)"} - {str(region.output_placements[0])}:
        changed = replace(region, output_placements=(Placement.parse(text),))
        assert check(changed), f"missed an output that should be {text}"
        # Also R for I, and the reverse: the final check takes both for the same numbers.
        assert refuses(check_forward, changed, WORLD), f"forward check missed an output {text}"


def test_forward_check_needs_no_process_group_and_minds_none() -> None:
    region = BLOCKS["attention"](True)
    assert not torch.distributed.is_initialized()
    check_forward(region, WORLD)
    assert not torch.distributed.is_initialized()
    with fake_group(3, rank=1):
        group = torch.distributed.group.WORLD
        check_forward(region, WORLD)
        assert torch.distributed.group.WORLD is group
        assert torch.distributed.get_world_size() == 3


def test_a_users_mesh_is_not_taken_for_the_checkers() -> None:
    """What DTensor answered about a mesh without a group is not its answer about one with it."""
    region = BLOCKS["mlp"](True)
    check_forward(region, WORLD)
    nodes = region.module.graph.nodes
    (activation,) = (node for node in nodes if node.target is aten.gelu.default)
    (operand,) = activation.all_input_nodes
    value = operand.meta["val"]  # a part of the last dim
    local = torch.empty(value.shape, dtype=value.dtype, device="meta")
    with fake_group(WORLD):
        mesh = init_device_mesh("cpu", (WORLD,))
        x = DTensor.from_local(local, mesh, [Shard(local.ndim - 1)])
        assert torch.nn.functional.gelu(x).device_mesh is mesh


# Real models.


@pytest.fixture(scope="module")
def gpt2() -> Program:
    captured = capture(zoo.build("gpt2", dropout=0.1), (), zoo.inputs("gpt2"))
    normalize(captured)
    return outline(captured)


# The blocks above prove the same in a tenth of the time.
@pytest.mark.slow
@SEQUENCE_PARALLEL
def test_refuses_every_broken_conversion_of_gpt2(gpt2: Program, sequence_parallel: bool) -> None:
    options = CompileOptions(tp=WORLD, sequence_parallel=sequence_parallel)
    kinds = set()
    for region in shard(gpt2, options).program.regions:
        check_forward(region, WORLD)
        check_compiled(region)
        for index, original in enumerate(conversions(region.module.graph)):
            for mutate in MUTATIONS:
                broken = copied(region)
                node = conversions(broken.module.graph)[index]
                if mutate(node) is False:
                    continue
                error = refuses(check_forward, broken, WORLD)
                assert error or refuses(check_compiled, broken), f"missed {original}"
                pair = placements_of(original)
                assert pair is not None
                kinds.add(pair[0].kind + pair[1].kind)
    assert {"PS", "SR"} <= kinds if sequence_parallel else {"PI", "IR"} <= kinds


def test_a_refusal_names_operator_module_and_line(gpt2: Program) -> None:
    regions = shard(gpt2, CompileOptions(tp=WORLD)).program.regions
    broken = copied(next(region for region in regions if region.name == "GPT2Block"))
    drop(conversions(broken.module.graph)[0])
    for check in (check_compiled, lambda region: check_forward(region, WORLD)):
        with pytest.raises(PlacementError, match=r"would give wrong numbers|declared") as caught:
            check(broken)
        text = str(caught.value)
        assert "module: transformer.h.0." in text
        assert re.search(r'File ".*\.py", line \d+', text)
        assert "aten." in text
        assert "S(0)" in text


def _product(x: Tensor) -> Tensor:
    return torch.tensordot(x, x, dims=1)


def _spectra(x: Tensor) -> Tensor:
    window = torch.ones(4, dtype=x.dtype)
    return torch.stft(x, 4, window=window, return_complex=True).abs()


@pytest.mark.parametrize(
    ("function", "operator"), [(_product, aten.tensordot.default), (_spectra, aten.stft.default)]
)
def test_types_an_operator_whose_torch_function_takes_other_arguments(
    function: Callable[[Tensor], Tensor], operator: Callable[..., Tensor]
) -> None:
    """``torch.tensordot`` takes both lists of dims as one, ``torch.stft`` two more by position."""
    region = sharded(function, {"x": ((8, 8), "R")}, "R", "Spectra")
    assert operator in [node.target for node, _ in check_forward(region, WORLD).trusted]
