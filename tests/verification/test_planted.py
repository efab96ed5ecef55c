"""One bug in each pass: verify() names the pass, and diff() shows the change first."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional as F

import sp_compiler
from sp_compiler import compiler
from sp_compiler.base.errors import PassError, PlacementError
from sp_compiler.base.pass_report import Pass
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.program import Region
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.stages import graphs_of
from sp_compiler.passes import fuse_attention, scale_products
from sp_compiler.passes.memory.tag_program import TaggedProgram
from sp_compiler.verification import verify as verification
from sp_compiler.verification.verify import VerifyReport, verify
from tests.helpers.slow import slow_but

aten = torch.ops.aten

FUNCTIONS = {
    Pass.EXPORT: "capture",
    Pass.NORMALIZE: "normalize",
    Pass.LOSS_ONLY: "loss_only",
    Pass.HALF_BATCHES: "half_batches",
    Pass.OUTLINE: "outline",
    Pass.SHARD: "shard",
    Pass.CHECK: "check_forward",
    Pass.FUSE_ATTENTION: "fuse_attention",
    Pass.JOINT: "trace_joint",
    Pass.SIMPLIFY: "simplify",
    Pass.CHUNK: "chunk",
    Pass.SCALE_PRODUCTS: "scale_products",
    Pass.TAG: "tag_program",
    Pass.PARTITION: "partition",
    Pass.SPLIT_BACKWARD: "split_backward",
    Pass.OVERLAP: "overlap_collectives",
    Pass.ASYNC_TP: "async_tp",
    Pass.CODEGEN: "compile_regions",
}
"""The name of each pass in the list of the compiler."""
OPTIONS: dict[Pass, dict[str, Any]] = {
    Pass.LOSS_ONLY: {"loss_only": True},
    Pass.HALF_BATCHES: {"half_batches": True},
    Pass.CHUNK: {"loss_chunks": 2},
    # What is gathered for a product is not scaled.
    Pass.SCALE_PRODUCTS: {"sequence_parallel": False},
    Pass.SPLIT_BACKWARD: {"split_backward": True},
    Pass.ASYNC_TP: {"async_tp": True},
}


class Model(nn.Module):
    """One residual block and a loss head, whose logits are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))])

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.head(hidden) * 0.3
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def _halve_a_product(graph: Graph) -> bool:
    """Halve the result of the first matrix product, if there is one."""
    products = (
        node for node in graph.nodes if "mm" in str(node.target) or "linear" in str(node.target)
    )
    node = next((node for node in products if node.op == "call_function"), None)
    if node is None:
        return False
    with graph.inserting_after(node):
        half = graph.call_function(aten.mul.Tensor, (node, 0.5))
    half.meta = dict(node.meta)
    node.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
    return True


def _graphs(name: Pass, left: Any) -> Sequence[Graph]:
    """The graphs that a bug of the pass would be in."""
    if isinstance(left, TaggedProgram):
        return [joint.graph for joint in left.joints.values()]
    if name == Pass.SPLIT_BACKWARD:
        return [] if left.split is None else [left.split.weights]
    if name == Pass.CODEGEN:
        return [item.partitioned.forward for item in left]
    return list(graphs_of(left, "region").values())


def _plant(name: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(compiler, FUNCTIONS[name])

    @functools.wraps(original)  # the runner tells the functions of a pass apart by their names
    def broken(*args: Any, **options: Any) -> Any:
        if name == Pass.CHECK:
            raise PassError(Pass.CHECK, "refuses what is right")
        if name == Pass.CODEGEN:  # its result is text
            for graph in _graphs(name, args[1]):
                _halve_a_product(graph)
        result = original(*args, **options)
        left = args[0] if result is None else result
        if name == Pass.TAG:  # which is shown by the tags that it left
            for region in left.program.regions:
                for node in region.module.graph.nodes:
                    node.meta.pop("recompute", None)
        for graph in _graphs(name, left) if name != Pass.CODEGEN else ():
            _halve_a_product(graph)
        return result

    monkeypatch.setattr(compiler, FUNCTIONS[name], broken)
    monkeypatch.setattr(verification, "capture", compiler.capture)


@functools.cache
def _inputs() -> dict[str, Tensor]:
    return {"ids": torch.arange(24).reshape(2, 12) * 7 % 32}


def _built(**options: Any) -> CompiledProgram:
    torch.manual_seed(0)
    return build(Model(), (), _inputs(), CompileOptions(tp=2, **options))


def _verify(**options: Any) -> VerifyReport:
    """``verify``, also with options that only pipelines set."""
    torch.manual_seed(0)
    checked = CompileOptions(tp=2, **options)
    with mock.patch.object(CompileOptions, "of", return_value=checked):
        return verify(Model(), ((), _inputs()), tp=2)


_right = functools.cache(_built)
# Simulated ranks have one batch, and exchange no rows: verify refuses an axis "ep".
_VERIFIED = [name for name in Pass if name != Pass.EXPERT_PARALLEL]


@pytest.mark.parametrize("name", slow_but((Pass.SIMPLIFY,), _VERIFIED))
def test_the_pass_is_named(name: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS.get(name, {})
    build = _right
    if name == Pass.FUSE_ATTENTION:  # which a GPU alone would run
        monkeypatch.setattr(fuse_attention, "DEVICES", ("cpu",))
        build = _built
    if name == Pass.SCALE_PRODUCTS:  # which leaves small ones alone
        monkeypatch.setattr(scale_products, "LEAST_ELEMENTS", 1)
        build = _built
    right = build(**options)
    _plant(name, monkeypatch)
    report = _verify(**options)
    assert report.first_bad_pass == name, str(report)
    if name == Pass.CHECK:  # nothing is built: the next test has a check that refuses an operator
        return
    wrong = _built(**options)
    if name == Pass.CODEGEN:  # its result is text
        (first, *_) = sp_compiler.diff(right.code, wrong.code).entries
        assert (first.kind, first.op) == ("inserted", "mul")
        assert " 0.5)" in first.text
        return
    diffs = {
        stage: sp_compiler.diff(right.stages[stage], wrong.stages[stage]) for stage in right.stages
    }
    stage, first = next((stage, diff) for stage, diff in diffs.items() if not diff.is_empty)
    assert stage == name
    changed = next(entry for entry in first.entries if entry.kind != "unchanged")
    if name == Pass.TAG:
        assert changed.kinds == ("tagged",)
    else:
        assert (changed.kind, changed.op) == ("inserted", "aten.mul.Tensor")


def test_right_programs_pass_with_a_delayed_backward() -> None:
    report = _verify(**OPTIONS[Pass.SPLIT_BACKWARD])
    assert report.ok, str(report)
    assert Pass.SPLIT_BACKWARD in {row.stage for row in report.table}


def test_a_check_that_refuses_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator runs replicated for it, which is what the diff shows first."""
    right = _right()
    original = compiler.check_forward

    @functools.wraps(original)
    def broken(region: Region, world_size: int) -> Any:
        for node in region.module.graph.nodes:
            if node.target is aten.gelu.default and node.meta["placement"].is_sharded:
                raise PlacementError(Pass.CHECK, "refuses what is right", node)
        return original(region, world_size)

    monkeypatch.setattr(compiler, "check_forward", broken)
    wrong = _built()
    assert any("gelu" in note for note in wrong.notes)
    stage, diff = next(
        (stage, diff)
        for stage in right.stages
        if not (diff := sp_compiler.diff(right.stages[stage], wrong.stages[stage])).is_empty
    )
    assert stage == Pass.SHARD
    changed = [entry for entry in diff.entries if entry.op == "aten.gelu"]
    assert [entry.kinds for entry in changed] == [("shape", "placement")]
