"""The generated code: it computes what the region computes, and reads as it should."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from sp_compiler.base.errors import PassError
from sp_compiler.codegen.loading import load
from sp_compiler.codegen.module_text import CompiledRegion, module_source
from sp_compiler.codegen.spelling import FUNCTIONS, METHODS
from sp_compiler.ir.program import Region
from sp_compiler.passes.memory.tag import POLICIES
from tests.helpers.compiled_region import compile_region
from tests.helpers.regions import TP1, Mlp, gpt_region, random_inputs, reference, region_of, sp

F64 = torch.float64
BLOCKS: dict[str, dict[str, Any]] = {
    "paper": {},
    "stored masks": {"masks": "stored"},
    "regenerated masks": {"masks": "regenerate"},
    "fused attention": {"attention": "fused"},
}


@functools.cache
def gpt_block(block: str) -> Region:
    return gpt_region(2, 8, 32, 4, dtype=F64, **BLOCKS[block])


def check_against_autograd(region: Region, policy: str, tolerance: float = 1e-12) -> CompiledRegion:
    """Emitted outputs and gradients equal those of autograd on the region's own graph."""
    compiled = compile_region(region, recompute=policy)
    inputs = random_inputs(region)
    expected = reference(region, inputs)
    outputs, saved = compiled.code.forward(TP1, *[x.detach() for x in inputs])
    torch.testing.assert_close(outputs, tuple(x.detach() for x in expected), rtol=0, atol=tolerance)

    used = [x for x, flows in zip(expected, compiled.differentiable, strict=True) if flows]
    tangents = [torch.randn(x.shape, dtype=x.dtype) for x in used]
    grads = compiled.code.backward(TP1, saved, *tangents)
    wanted = [x for x in inputs if x.requires_grad]
    expected_grads = iter(torch.autograd.grad(used, wanted, tangents, allow_unused=True))
    for x, grad in zip(inputs, grads, strict=True):
        reference_grad = next(expected_grads) if x.requires_grad else None
        if reference_grad is None:
            assert grad is None or not grad.any()
        else:
            scale = reference_grad.abs().max().item() + 1e-3
            torch.testing.assert_close(grad, reference_grad, rtol=0, atol=tolerance * scale)
    return compiled


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", BLOCKS)
def test_gpt_block_equals_autograd(block: str, policy: str) -> None:
    check_against_autograd(gpt_block(block), policy)


def test_the_comparison_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_compiler.codegen.module_text.load", _load_without_one_sum)
    with pytest.raises(AssertionError, match="not close"):
        check_against_autograd(gpt_block("paper"), "selective")


def _load_without_one_sum(source: str, _: Any) -> dict[str, Any]:
    changed = re.sub(r"(= grad_\w+) \+ (grad_\w+)", r"\1 - \2", source)
    assert changed != source
    return load(changed)


class Head(nn.Module):
    """Vocabulary-parallel embedding and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4, dtype=F64))

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        embedded = sp.convert(sp.vocab_embedding(self.table, ids, 7, 1), "P", "S(0)", 1)
        logits = F.linear(sp.convert(embedded + x, "S(0)", "R", 1), self.table)
        nll, _ = sp.vocab_nll(logits, ids, -100, 7, 1)
        return nll.mean()


class Assorted(nn.Module):
    """Operators that are printed in a way of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=F64))
        self.weight = nn.Parameter(torch.randn(4, dtype=F64))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = F.linear(x, self.w).chunk(2, -1)
        both = torch.cat([first * second.sigmoid(), -first], 1)[:, 1:5]
        both = both.narrow(1, 0, 4) / 2 + torch.ones(4, dtype=x.dtype, device=x.device)
        norm = both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        mask = torch.arange(4, device=x.device) > 1
        masked = torch.where(mask, norm, torch.full((), -1.0, dtype=x.dtype, device=x.device))
        stacked = torch.stack([masked, norm.tanh()], 1).masked_fill(~mask, float("-inf"))
        rolled = torch.cat([norm[..., 2:], norm[..., :2]], -1)[::2]
        log = F.log_softmax(masked, -1).select(0, 1).unsqueeze(0).expand(3, 4)
        sliced = x[:, :0].reshape(0)
        return stacked.exp(), F.silu(rolled), log, F.relu(norm).t(), sliced, x.new_zeros(2)


@pytest.mark.parametrize("policy", POLICIES)
def test_other_regions_equal_autograd(policy: str) -> None:
    ids, x = torch.randint(0, 7, (5,)), torch.randn(5, 4, dtype=F64)
    check_against_autograd(region_of(Head(), ids, x, kinds=["input", "call"]), policy)
    check_against_autograd(region_of(Mlp(4).double(), x), policy)
    check_against_autograd(region_of(Assorted(), x), policy)


def test_emitted_code_equals_the_joint_graph_bitwise() -> None:
    """With everything kept nothing is computed in another order."""
    region = region_of(Assorted(), torch.randn(5, 4, dtype=F64))
    compiled = compile_region(region, recompute="none")
    inputs = [x.detach() for x in random_inputs(region)]
    outputs, saved = compiled.code.forward(TP1, *inputs)
    tangents = [
        torch.randn_like(x) for x, d in zip(outputs, compiled.differentiable, strict=True) if d
    ]
    grads = compiled.code.backward(TP1, saved, *tangents)
    expected = fx.GraphModule({}, compiled.joint.graph)(*inputs, *tangents)
    for actual, wanted in zip((*outputs, *grads), expected, strict=True):
        assert torch.equal(actual, wanted)


def test_inputs_and_saved_values_are_left_as_they_are() -> None:
    compiled = compile_region(gpt_block("stored masks"), recompute="selective")
    inputs = [x.detach() for x in random_inputs(gpt_block("stored masks"))]
    before = [x.clone() for x in inputs]
    (out,), saved = compiled.code.forward(TP1, *inputs)
    kept = [x.clone() for x in saved]
    first = compiled.code.backward(TP1, saved, torch.ones_like(out))
    second = compiled.code.backward(TP1, saved, torch.ones_like(out))
    assert all(map(torch.equal, inputs, before))
    assert all(map(torch.equal, saved, kept))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_saved_tuple_is_what_the_accounting_says() -> None:
    compiled = compile_region(gpt_block("stored masks"), recompute="none")
    inputs = [x.detach() for x in random_inputs(gpt_block("stored masks"))]
    _, saved = compiled.code.forward(TP1, *inputs)
    given = {x.untyped_storage().data_ptr() for x in inputs if x.dim() < 2 or x.shape[0] != 16}
    records = compiled.partitioned.saved
    assert [tuple(x.shape) for x in saved] == [record.shape for record in records]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
    assert len(storages) == len(saved)
    kept = [x for x, record in zip(saved, records, strict=True) if record.is_activation]
    total = sum(x.untyped_storage().nbytes() for x in kept)
    assert total == compiled.partitioned.kept_bytes
    assert given.isdisjoint(x.untyped_storage().data_ptr() for x in kept)


def test_tracebacks_show_the_generated_line() -> None:
    compiled = compile_region(gpt_block("paper"), recompute="none")
    inputs = [x.detach() for x in random_inputs(gpt_block("paper"))]
    inputs[-2] = inputs[-2][:, :-1]
    with pytest.raises(RuntimeError) as caught:
        compiled.code.forward(TP1, *inputs)
    text = "".join(traceback.format_exception(caught.value))
    assert "= torch.native_layer_norm(" in text
    assert "<sp_compiler " in text


def test_one_module_for_several_regions() -> None:
    regions = [
        region_of(Mlp(4), torch.randn(3, 4), name="First"),
        gpt_region(2, 8, 32, 4, dtype=F64),
    ]
    texts = [compile_region(region, recompute="selective").text for region in regions]
    namespace = load(module_source(texts))
    assert {"First", "GptBlock"} <= namespace.keys()
    lines = module_source(texts).splitlines()
    bound = [line for line in lines if line.startswith("aten_")]
    assert bound == sorted(set(bound))


def test_values_die_where_their_storage_does() -> None:
    compiled = compile_region(gpt_block("paper"), recompute="full")
    lines = [line.strip() for line in compiled.source.splitlines()]
    deletes = [line for line in lines if line.startswith("del ")]
    names = [name for line in deletes for name in line.removeprefix("del ").split(", ")]
    inputs = {compiled.text.names[node.name] for node in compiled.joint.inputs}
    assert {"ln_1", "ln_1_gathered", "qkv"} <= set(names)
    assert inputs.isdisjoint(names)


class _Convert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return sp.convert(x.exp(), "R", "P", 1)


def test_unknown_conversion_is_refused() -> None:
    region = region_of(_Convert(), torch.randn(3), requires_grad=[False])
    with pytest.raises((PassError, KeyError), match=r"R -> P|'R', 'P'"):
        compile_region(region, recompute="none").text  # noqa: B018


@pytest.mark.parametrize("overload", sorted(FUNCTIONS, key=str), ids=str)
def test_functions_are_bound_to_builtins(overload: Any) -> None:
    """Python wrappers would cost what the table is there to save."""
    function: Callable[..., Any] = eval(FUNCTIONS[overload], {"torch": torch, "F": F})
    assert type(function).__name__ == "builtin_function_or_method"


@pytest.mark.parametrize("overload", sorted(METHODS, key=str), ids=str)
def test_methods_exist(overload: Any) -> None:
    assert hasattr(Tensor, METHODS[overload])
