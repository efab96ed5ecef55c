"""Tensors that each policy saves: exact bytes of the paper's block, and where the tags stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from sp_compiler.base.errors import ArgumentError, PassError
from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.forward_backward import SavedTensor
from sp_compiler.ir.program import Region
from sp_compiler.passes.memory.forward_facts import ForwardFacts, forward_facts
from sp_compiler.passes.memory.partition import partition
from sp_compiler.passes.memory.recompute_policy import RecomputePolicy, Tag
from sp_compiler.passes.memory.tag import POLICIES, tag_recompute
from sp_compiler.passes.simplify import simplify
from sp_compiler.trace.joint import JointGraph, trace_joint
from tests.helpers.regions import Mlp, gpt_region, region_of, sp

aten = torch.ops.aten
B, SEQ, H, A = 2, 64, 512, 8
SBH, ASSB = SEQ * B * H, A * SEQ * SEQ * B

# (policy, masks): bytes in units of s*b*h and of a*s*s*b, for a block in bfloat16.
KEPT = {
    ("none", "stored"): (34, 5),
    ("none", "regenerate"): (32, 4),
    ("attention", "stored"): (34, 0),
    ("attention", "regenerate"): (32, 0),
    ("selective", "stored"): (22, 0),
    ("selective", "regenerate"): (20, 0),
    ("full", "stored"): (2, 0),
    ("full", "regenerate"): (2, 0),
}


def tagged(region: Region, policy: str) -> JointGraph:
    joint = trace_joint(region)
    simplify(joint.graph)
    tag_recompute(joint, policy)
    return joint


def kept(region: Region, policy: str) -> list[SavedTensor]:
    return [x for x in partition(tagged(region, policy)).saved if x.is_activation]


def forward_nodes(joint: JointGraph) -> list[Node]:
    backward = joint.backward_nodes()
    return [n for n in joint.graph.nodes if n.op == "call_function" and n not in backward]


def is_row_statistic(tensor: SavedTensor) -> bool:
    return tensor.op == "native_layer_norm" and tensor.shape == (B * SEQ, 1)


@pytest.mark.parametrize(("policy", "masks"), KEPT)
def test_gpt_block_keeps_the_papers_bytes(policy: str, masks: str) -> None:
    tensors = kept(gpt_region(B, SEQ, H, A, dtype=torch.bfloat16, masks=masks), policy)
    statistics = [x for x in tensors if is_row_statistic(x)]
    rest = [x for x in tensors if not is_row_statistic(x)]
    sbh, assb = KEPT[policy, masks]
    assert sum(x.num_bytes for x in rest) == sbh * SBH + assb * ASSB
    assert len(statistics) == (4 if policy in ("none", "attention") else 0)
    for tensor in rest:  # each of these is at least 2 % of the block
        assert tensor.reason
        assert tensor.kind == "call" or tensor.op


@pytest.mark.parametrize(("policy", "sbh"), [("none", 32), ("selective", 20), ("full", 2)])
def test_fused_attention_keeps_no_square(policy: str, sbh: int) -> None:
    region = gpt_region(B, SEQ, H, A, dtype=torch.bfloat16, masks="regenerate", attention="fused")
    tensors = kept(region, policy)
    logsumexp = [x for x in tensors if x.shape == (B, A, SEQ)]
    assert len(logsumexp) == (policy != "full")
    rest = [x for x in tensors if x not in logsumexp and not is_row_statistic(x)]
    assert sum(x.num_bytes for x in rest) == sbh * SBH


def test_saved_tensors_say_where_they_come_from() -> None:
    region = gpt_region(B, SEQ, H, A, dtype=torch.bfloat16, masks="regenerate")
    by_name = {x.name: x for x in kept(region, "selective")}
    assert by_name["x"].kind == "call"
    qkv = next(x for x in by_name.values() if x.module == "qkv")
    assert (qkv.op, qkv.reason, qkv.shape) == ("linear", "result of a linear", (B * SEQ, 3 * H))
    assert qkv.line.startswith("regions.py:")
    assert qkv.num_bytes == 6 * SBH


def test_parameters_buffers_and_seeds_are_handed_over_but_cost_nothing() -> None:
    region = gpt_region(B, SEQ, H, A, dtype=torch.bfloat16, masks="regenerate")
    saved = partition(tagged(region, "selective")).saved
    kinds = {x.kind for x in saved if not x.is_activation}
    assert kinds == {"param", "buffer", "seed"}


def test_every_forward_node_is_tagged_and_no_backward_node() -> None:
    joint = tagged(gpt_region(2, 8, 32, 4, dtype=torch.float64, masks="stored"), "selective")
    forward = forward_nodes(joint)
    assert all(n.meta["recompute"] in ("save", "recompute") for n in forward)
    assert all(n.meta["recompute_reason"] for n in forward)
    assert all("recompute" not in n.meta for n in joint.backward_nodes())


@pytest.mark.parametrize("policy", ["none", "attention", "selective", "full"])
def test_gathered_values_and_views_are_never_kept(policy: str) -> None:
    joint = tagged(gpt_region(2, 8, 32, 4, dtype=torch.float64), policy)
    for node in forward_nodes(joint):
        gathers = node.target is sp.convert.default and node.args[1:3] == ("S(0)", "R")
        if gathers or node.target in (aten.view.default, aten.transpose.int):
            assert node.meta["recompute"] == "recompute"


def test_unknown_policy_is_refused() -> None:
    joint = trace_joint(region_of(Mlp(4), torch.randn(3, 4)))
    names = ", ".join(POLICIES)
    with pytest.raises(ArgumentError, match=f"recompute='some': expected one of {names}"):
        tag_recompute(joint, "some")


def _raising(node: Node, facts: ForwardFacts) -> Tag:
    raise KeyError("heads")


@pytest.mark.parametrize(
    ("decide", "problem"),
    [
        (_raising, "raised KeyError: 'heads'"),
        (lambda node, facts: "keep", "returned 'keep'; expected"),
        (lambda node, facts: ("keep", "so"), "returned ('keep', 'so'); expected"),
        (lambda node, facts: None, "returned None; expected"),
    ],
)
def test_a_policy_that_fails_is_named(
    decide: Callable[[Node, ForwardFacts], Tag], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, Any], POLICIES), "mine", RecomputePolicy(decide, 1))
    joint = trace_joint(region_of(Mlp(4), torch.randn(3, 4)))
    with pytest.raises(PassError, match="recompute policy 'mine'") as raised:
        tag_recompute(joint, "mine")
    first = str(raised.value).splitlines()[0]
    assert f"asked for an operator of region {joint.region!r}, {problem}" in first
    assert raised.value.node in joint.graph.nodes
    assert raised.value.pass_name == Pass.TAG


class _Function(nn.Module):
    """``function(module, x)`` with a few weights (4, 4)."""

    frequencies: Tensor

    def __init__(self, function: Callable[[_Function, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w, self.v = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
        self.register_buffer("frequencies", torch.randn(1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _rotary(m: _Function, x: Tensor) -> Tensor:
    positions = torch.arange(8, dtype=torch.float32).view(1, 1, 8)
    angles = torch.bmm(m.frequencies, positions).transpose(1, 2).repeat(1, 1, 2)
    q = (x @ m.w) * angles.cos()
    return torch.bmm(torch.bmm(q, (x @ m.v).mT).softmax(-1), x @ m.v)


# What is found as attention: number of nodes in the core with a matrix product, number of contexts.
CORES: dict[str, tuple[Callable[[_Function, Tensor], Tensor], int, int]] = {
    "attention": (
        lambda m, x: torch.bmm(torch.bmm(x @ m.w, (x @ m.v).mT).softmax(-1), x @ m.v),
        1,
        1,
    ),
    "attention without softmax": (lambda m, x: torch.bmm(torch.bmm(x, x.mT), x), 1, 1),
    "scores that nothing multiplies": (lambda m, x: torch.bmm(x, x.mT).softmax(-1), 0, 0),
    "products with parameters only": (lambda m, x: (x @ m.w).relu() @ m.v, 0, 0),
    "product with a cast parameter": (
        lambda m, x: (x.double() @ m.w.double()).softmax(-1) @ m.v.double(),
        0,
        0,
    ),
    "rotary angles are no scores": (_rotary, 1, 1),
    "two attentions in a row": (
        lambda m, x: torch.bmm(
            torch.bmm(torch.bmm(torch.bmm(x, x.mT), x) @ m.w, x.mT).softmax(-1), x
        ),
        2,
        2,
    ),
}


@pytest.mark.parametrize("case", CORES)
def test_where_the_attention_core_is(case: str) -> None:
    function, num_scores, num_contexts = CORES[case]
    joint = trace_joint(region_of(_Function(function), torch.randn(2, 8, 4)))
    simplify(joint.graph)
    facts = forward_facts(joint)
    assert len([n for n in facts.core if n.target is aten.bmm.default]) == num_scores
    assert len(facts.contexts) == num_contexts


def test_core_ends_before_the_context_and_before_the_linears() -> None:
    joint = tagged(gpt_region(2, 8, 32, 4, dtype=torch.float64, masks="stored"), "attention")
    reasons: dict[str, list[object]] = {}
    for node in forward_nodes(joint):
        reasons.setdefault(node.meta["recompute_reason"], []).append(node.target)
    core = reasons["attention core"]
    assert core.count(aten.bmm.default) == 1
    assert aten._softmax.default in core
    assert core.count(sp.dropout_mask.default) == 1
    assert reasons["used by backward"].count(aten.bmm.default) == 1  # the context
    assert reasons["used by backward"].count(sp.dropout_mask.default) == 2


class _Grouped(nn.Module):
    """Attention whose one key and value head is repeated for two query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).view(2, 6, 2, 4).transpose(1, 2)
        k = self.k(x).view(2, 6, 1, 4).transpose(1, 2)
        k = k.expand(2, 2, 6, 4)
        return torch.matmul(torch.matmul(q, k.mT).softmax(-1), k)


@pytest.mark.parametrize("policy", ["none", "attention", "selective"])
def test_repeated_heads_are_kept_once(policy: str) -> None:
    saved = kept(region_of(_Grouped(), torch.randn(2, 6, 8)), policy)
    (key,) = [x for x in saved if x.module == "k"]
    assert key.shape == (12, 4)


class _Norm(nn.Module):
    """A norm in float32 inside a bfloat16 model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(torch.bfloat16) * self.weight


def test_wider_casts_are_repeated_and_narrower_ones_kept() -> None:
    joint = tagged(region_of(_Norm(), torch.randn(4, 8, dtype=torch.bfloat16)), "none")
    wider, narrower = (n for n in forward_nodes(joint) if n.target is aten._to_copy.default)
    assert wider.meta["recompute_reason"] == "wider cast of a kept tensor"
    assert narrower.meta["recompute"] == "save"


class _CastWeight(nn.Module):
    """A linear that computes in bfloat16 with a weight of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(torch.bfloat16))


def test_a_product_with_a_cast_weight_is_linear() -> None:
    joint = tagged(region_of(_CastWeight(), torch.randn(4, 8, dtype=torch.bfloat16)), "selective")
    (cast,) = (n for n in forward_nodes(joint) if n.target is aten._to_copy.default)
    assert cast.meta["recompute_reason"] == "cast of a parameter"
    facts = forward_facts(joint)
    assert [n.target for n in facts.linears] == [aten.linear.default]
    assert not facts.core


class _Loss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        nll, _ = sp.vocab_nll(logits, target, -100, 7, 1)
        return nll.sum()


def test_operators_that_communicate_inside_are_not_run_twice() -> None:
    region = region_of(
        _Loss(), torch.randn(6, 7), torch.randint(0, 7, (6,)), kinds=["call", "input"]
    )
    saved = kept(region, "full")
    assert [(x.op, x.reason) for x in saved if x.kind == "activation"] == [
        ("vocab_nll", "its collectives are not repeated")
    ]


class _Constants(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return F.gelu(x).masked_fill(mask, 0.0) * torch.arange(4.0)


def test_constants_are_made_again() -> None:
    joint = tagged(region_of(_Constants(), torch.randn(4, 4)), "none")
    constants = [n for n in forward_nodes(joint) if n.meta["recompute_reason"] == "constant"]
    assert {aten.tril.default, aten.arange.default} <= {n.target for n in constants}
    assert [x.name for x in kept(region_of(_Constants(), torch.randn(4, 4)), "none")] == ["x"]
