"""Formulas of what is kept for backward: derived at one size, they must hold at others."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.planning.data import BlockPlan
from sp_compiler.planning.formula import ActivationFormula
from sp_compiler.planning.larger_batch import with_batch_formulas
from sp_compiler.planning.plan import Plan
from sp_compiler.planning.planned_program import PlannedProgram
from tests.helpers.slow import slow
from tests.models import architectures, zoo

T = sympy.Symbol("t", positive=True, integer=True)


@cache
def _plan(name: str, tp: int, recompute: str, batch: int = 2, seq: int = 12, **sizes: Any) -> Plan:
    model = zoo.build(name, dropout=0.1, dtype=torch.bfloat16, **sizes)
    inputs = zoo.inputs(name, batch, seq)
    return plan(model, ((), inputs), tp=tp, recompute=recompute)  # type: ignore[arg-type]


def _assert_exact(found: Plan) -> ActivationFormula:
    formula = found.activation_formula
    assert formula.value(formula.total) == found.activation_bytes
    for block in found.blocks:
        assert formula.value(formula.blocks[block.name]) == block.kept_bytes
        tensors = formula.tensors[block.name]
        assert [formula.value(text) for text in tensors] == [x.num_bytes for x in block.kept]
    return formula


def _layer(found: Plan, formula: ActivationFormula) -> sympy.Expr:
    return formula.widths_only(
        formula.blocks[max(found.blocks, key=lambda block: block.num_calls).name]
    )


def _same(found: sympy.Expr, expected: str) -> bool:
    symbols = {str(symbol): symbol for symbol in found.free_symbols}
    return bool(sympy.expand(found - sympy.sympify(expected, symbols)) == 0)


GOLDEN = [
    # model, ranks, recompute, bytes of a layer in bfloat16
    ("plain", 1, "none", "b*s*(32*h + 4*a*s)"),
    ("plain", 2, "selective", "20*b*s*h/t"),
    slow("plain", 2, "full", "2*b*s*h/t"),
    slow("bert", 2, "selective", "22*b*s*h/t"),
]


@pytest.mark.parametrize(("name", "tp", "recompute", "expected"), GOLDEN)
def test_bytes_of_a_layer(name: str, tp: int, recompute: str, expected: str) -> None:
    layer = _layer(found := _plan(name, tp, recompute), _assert_exact(found))
    assert _same(layer, expected), layer


OTHER_SIZES = [
    # model, ranks, recompute, and what else is larger, by field and by symbol
    (
        "plain",
        2,
        "none",
        {"hidden_size": 48, "num_heads": 6, "layers": 3},
        {"h": 48, "a": 6, "L": 3},
    ),
    slow(
        "llama_gqa8",
        2,
        "none",
        {"intermediate_size": 104, "num_key_value_heads": 2},
        {"f": 104, "k": 2},
    ),
]


@pytest.mark.parametrize(("name", "tp", "recompute", "fields", "symbols"), OTHER_SIZES)
def test_a_formula_holds_at_other_sizes(
    name: str, tp: int, recompute: str, fields: dict[str, int], symbols: dict[str, int]
) -> None:
    """Batch, length and widths change; the formula of the first plan gives the second's bytes."""
    formula = _plan(name, tp, recompute).activation_formula
    other = _plan(name, tp, recompute, 4, 18, **fields)
    assert formula.value(formula.total, b=4, s=18, **symbols) == other.activation_bytes
    for block in other.blocks:
        found = formula.value(formula.blocks[block.name], b=4, s=18, **symbols)
        assert found == block.kept_bytes


class _Packed(nn.Module):
    """Attention whose q, k and v of each head lie side by side, as in some GPTs and Persimmon."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.qkv(x).view(2, 12, 4, 3, 8)[..., i, :].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k.tanh(), v).transpose(1, 2).reshape(2, 12, 32)
        return x + self.out(y)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_picked_by_number_is_a_number(tp: int) -> None:
    """A dim whose every element the model names has no other size, and no symbol."""
    found = plan(_Packed(), ((torch.randn(2, 12, 32),), {}), tp=tp, recompute="none")
    assert _same(_assert_exact(found).total, "4*a*b*s*(8*d + 1)" + "/t" * (tp > 1))


class _TalkingHeads(nn.Module):
    """Attention whose scores and weights are mixed between the heads; a head after it, whose
    softmax is none of attention."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.embed = heads, nn.Embedding(40, 32)
        self.stem = nn.Conv1d(32, 32, 3, padding=1)
        self.depthwise = nn.Conv1d(32, 32, 3, padding=1, groups=32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.pre, self.post = (nn.Parameter(torch.randn(heads, heads)) for _ in range(2))
        self.gate, self.pooled, self.classes = nn.Linear(32, 6), nn.Linear(32, 24), nn.Linear(24, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).transpose(1, 2)
        x = x + self.depthwise(self.stem(x))
        x = x.transpose(1, 2)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = torch.einsum("hg,bgij->bhij", self.pre, q @ k.transpose(-1, -2))
        weights = torch.einsum("hg,bgij->bhij", self.post, scores.softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        gates = self.gate(x).softmax(-1).amax(-1, keepdim=True)
        return self.classes(self.pooled((x * gates).mean(1)).tanh()).square().mean()


@pytest.mark.parametrize("tp", [*map(slow, (1, 2))])
def test_heads_that_are_mixed_are_heads(tp: int) -> None:
    """Their products with weights hide neither the sequence nor the heads."""

    def planned(heads: int, batch: int, seq: int) -> Plan:
        ids = torch.zeros(batch, seq, dtype=torch.long)
        return plan(_TalkingHeads(heads), ((ids,), {}), tp=tp, recompute="none")

    formula = _assert_exact(planned(4, 3, 12))
    roles = {name: formula.symbols[name].value for name in "bsad"}
    assert roles == {"b": 3, "s": 12, "a": 4, "d": 8}
    # No size between is known twice, and a softmax over gates is no attention.
    others = {size.value for name, size in formula.symbols.items() if name not in {*"bsadt"}}
    assert others == {32, 24, 6, 5}
    gates = {name: size.value for name, size in formula.symbols.items() if not size.has_role}
    assert {*gates.values()} == {6, 5}
    other = planned(8, 2, 18)
    sizes = {"b": 2, "s": 18, "a": 8, "d": 4, **gates}
    assert formula.value(formula.total, **sizes) == other.activation_bytes


def test_the_sequence_of_a_model_without_attention_is_that_of_its_ids() -> None:
    model = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    ids = torch.zeros(3, 12, dtype=torch.long)
    for tp in (1, 2):  # a sharded vocabulary is looked up by another operator
        formula = _assert_exact(plan(model, ((ids,), {}), tp=tp, recompute="none"))
        assert (formula.symbols["s"].value, formula.symbols["b"].value) == (12, 3)
    states = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    formula = plan(states, ((torch.zeros(3, 12, 32),), {}), tp=1).activation_formula
    assert formula.symbols["s"].value == 12
    sound = nn.Sequential(nn.Conv1d(6, 8, 3), nn.GELU(), nn.Conv1d(8, 8, 3))
    formula = plan(sound, ((torch.zeros(3, 6, 12),), {}), tp=1).activation_formula
    assert "s" not in formula.symbols  # channels are no sequence


def test_the_legend_has_the_symbols_of_the_formulas_alone() -> None:
    """What the model returns is not counted: its width is in no formula that is shown."""
    model = nn.Sequential(nn.Linear(32, 40), nn.Tanh())
    found = plan(model, ((torch.zeros(3, 12, 32),), {}), tp=1, recompute="none")
    assert 40 in {size.value for size in found.activation_formula.symbols.values()}
    assert "= 40" not in str(found.activation_formula)
    assert "h = 32: hidden" in str(_plan("plain", 2, "selective").activation_formula)


@pytest.mark.slow
def test_a_padded_width_is_rounded_up() -> None:
    """Formulas name it by its true size, and hold at another one."""
    odd = {"intermediate_size": 103, "vocab_size": 129}
    formula = _plan("llama_gqa8", 4, "none", layers=1, **odd).activation_formula
    assert {formula.symbols[name].value for name in "fv"} == {103, 129}
    rounded = sympy.ceiling(sympy.Symbol("f", positive=True, integer=True) / T)
    assert formula.blocks["LlamaDecoderLayer"].has(rounded)
    other = _plan("llama_gqa8", 4, "none", layers=1, **{**odd, "intermediate_size": 105})
    assert formula.value(formula.total, f=105) == other.activation_bytes


@pytest.mark.parametrize("batch", [slow(1), slow(3)])
def test_padded_rows_of_a_program_are_rounded_up(batch: int) -> None:
    """17 tokens of an image on 2 ranks; four images need no padding."""
    formula = _plan("vit", 2, "none", batch, layers=1).activation_formula
    assert (layer := formula.blocks["ViTLayer"]).has(sympy.ceiling)
    other = _plan("vit", 2, "none", 4, layers=1).block("ViTLayer")
    assert formula.value(layer, b=4) == other.kept_bytes
    # Widths of queries and values are one size, and listed once.
    assert "d" in formula.symbols
    assert "d2" not in formula.symbols


# Coincident sizes: (ranks, batch, sequence) at which a formula is derived, each with what else is
# the same number in the zoo's models, which have 4 or 8 heads, 2 or 4 of them of keys and values.
COINCIDENCES = {
    "batch of one, one kv head a rank": (4, 1, 12),
    "batch of one, half of the heads a rank": (2, 1, 12),
    "batch = ranks = kv heads": (4, 4, 12),
    "batch = sequence = ranks": (4, 4, 4),
    "batch * sequence = hidden": (2, 2, 16),
    "sequence = hidden": (2, 2, 32),
    "sequence = heads, batch of one": (1, 1, 4),
}
OTHER_BATCH, OTHER_SEQ = OTHER = 4, 24
# A model for each: all pairs would take a quarter of an hour.
_IN_TURN = ("llama_gqa8", "gpt2", "bert", "vit", "t5", "encoder", "lora")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "coincidence"), [*zip(_IN_TURN, COINCIDENCES, strict=True)])
def test_coincident_sizes_are_told_apart(name: str, coincidence: str) -> None:
    assert _told_apart(name, *COINCIDENCES[coincidence]), "the formulas refuse all blocks"


def _told_apart(name: str, tp: int, batch: int, seq: int) -> int:
    """Blocks whose formula gives their bytes at other sizes; all other formulas must refuse them.

    A block that is placed otherwise there, or saves other tensors, is another block: a slice of a
    batch of one is a view, of a larger one a copy.
    """
    first, other = (_plan(name, tp, "none", *at, layers=1) for at in ((batch, seq), OTHER))
    formula = _assert_exact(first)
    lengths = {"s": 0, "s2": 0} if name != "t5" else {"s": 3, "s2": 0}
    if name == "vit":  # its sequence is the image's
        lengths = {}
    assert "b" not in formula.symbols or formula.symbols["b"].value == batch
    sizes = {"b": OTHER_BATCH} | {symbol: OTHER_SEQ + more for symbol, more in lengths.items()}
    sizes = {symbol: size for symbol, size in sizes.items() if symbol in formula.symbols}
    told = 0
    for block, there in zip(first.blocks, other.blocks, strict=True):
        if _structure(block) != _structure(there):
            continue
        try:
            num_bytes = formula.value(formula.blocks[block.name], **sizes)
        except ArgumentError:
            continue
        assert num_bytes == there.kept_bytes, formula.blocks[block.name]
        told += 1
    return told


def _structure(block: BlockPlan) -> tuple[Any, ...]:
    """Saved tensors but for their sizes, and collectives, which tell of placements."""
    collectives = [(item.kind, item.count) for item in (*block.forward, *block.backward)]
    return block.name, sorted(tensor.dtype for tensor in block.kept), collectives


@pytest.mark.slow
def test_one_kv_head_a_rank_in_a_batch_of_one() -> None:
    """Llama-3-70B's case: 8 ranks, 8 kv heads, one sequence."""
    formula = _plan("llama_gqa8", 4, "selective", batch=1).activation_formula
    expected = "b*s*(8*h + 4*k*h/a + 4*f)/t"
    layer = formula.widths_only(formula.blocks["LlamaDecoderLayer"])
    assert _same(layer, expected), layer
    assert (formula.symbols["b"].value, formula.symbols["k"].value) == (1, 4)


@pytest.mark.slow
def test_a_batch_of_one_that_is_not_told_is_derived_at_a_larger_one() -> None:
    """One head on each rank is another size of 1, which a model may hide beside the batch."""
    compiled, compile_at = _compiled("encoder", tp=4)
    own, told = (
        with_batch_formulas(compiled, (), zoo.inputs("encoder", 1, 12), at).activation_formula
        for at in (_raise, compile_at)
    )
    assert (own.tells_batch, told.tells_batch) == (False, True)
    assert told.symbols["b"].value == 1
    assert told.value(told.total) == own.value(own.total) == compiled.plan.activation_bytes
    other = _plan("encoder", 4, "none", batch=3, layers=1)
    for block in other.blocks:
        assert told.value(told.blocks[block.name], b=3) == block.kept_bytes
    assert told.value(told.total, b=3) == other.activation_bytes
    with pytest.raises(ArgumentError, match="make a plan with a batch of two"):
        own.value(own.blocks["TransformerEncoderLayer"], b=3)


def _compiled(name: str, tp: int) -> tuple[PlannedProgram, Callable[..., PlannedProgram]]:
    """A program for a batch of one, and what compiles the model for others."""
    model = zoo.build(name, dropout=0.1, dtype=torch.bfloat16, layers=1)
    compile_at = partial(build, model, options=CompileOptions(tp=tp, recompute="none"))
    return compile_at((), zoo.inputs(name, 1, 12)), compile_at


def _raise(*_: Any, **__: Any) -> PlannedProgram:
    raise ValueError("this model takes one sequence at a time")


def test_a_formula_refuses_what_it_does_not_tell() -> None:
    formula = _plan("llama_gqa8", 2, "none", layers=1).activation_formula
    layer = formula.blocks["LlamaDecoderLayer"]
    with pytest.raises(ArgumentError, match="there is no x, only t, s, b"):
        formula.value(layer, x=3)
    with pytest.raises(
        ArgumentError, match="d is 4 like h/a in this plan, and written as such: d = 8"
    ):
        formula.value(layer, d=8)
    assert formula.value(layer, d=8, h=64) == formula.value(layer, h=64)
    with pytest.raises(ArgumentError, match="k = 3 is not divisible by t = 2"):
        formula.value(layer, k=3)
    with pytest.raises(ArgumentError, match=r"b\*s = 27 is not divisible by t = 2"):
        formula.value(layer, b=3, s=9)


def test_what_a_batch_of_one_does_not_tell_is_a_size_of_its_own() -> None:
    """ViT expands its class token to (1, 1, h): that is the batch, or a 1 that is broadcast."""
    formula = _compiled("vit", tp=1)[0].plan.activation_formula
    doubted = [
        name for name, size in formula.symbols.items() if "indistinguishable" in size.meaning
    ]
    with pytest.raises(ArgumentError, match=f"{doubted[0]} is the batch, or a dim of size 1"):
        formula.value(sympy.Symbol(doubted[0], positive=True, integer=True), b=2)


@pytest.mark.slow
def test_a_batch_of_one_is_a_batch() -> None:
    formula = _plan("plain", 2, "none", batch=1, layers=1).activation_formula
    other = _plan("plain", 2, "none", batch=2, layers=1)
    assert formula.value(formula.blocks["Block"], b=2) == other.block("Block").kept_bytes


# The formulas of most models are compared above; here in what settings no test there has.
@pytest.mark.parametrize(
    ("name", "tp", "recompute"), [("plain", 1, "none"), slow("peft_gpt2", 8, "attention")]
)
def test_models_have_an_exact_formula(name: str, tp: int, recompute: str) -> None:
    _assert_exact(_plan(name, tp, recompute))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "swin"])
def test_architectures_have_an_exact_formula(name: str) -> None:
    size = architectures.size("dividing", 4)
    model, inputs = architectures.build(name, size), architectures.inputs(name, size)
    _assert_exact(plan(model, ((), inputs), tp=4))


def test_json_has_every_formula() -> None:
    found = _plan("plain", 2, "selective")
    data = json.loads(found.to_json())
    formula = data["activation_formula"]
    values = {name: size["value"] for name, size in formula["symbols"].items()}
    assert sympy.sympify(formula["total"]).subs(values) == found.activation_bytes
    for block in data["blocks"]:
        for tensor in block["kept"]:
            assert sympy.sympify(tensor["formula"]).subs(values) == tensor["num_bytes"]
    assert "h" in values
    assert formula["symbols"]["d"]["equal_to"] == "h/a"


def test_a_copied_plan_has_its_formula() -> None:
    found = _plan("plain", 2, "selective")
    assert pickle.loads(pickle.dumps(found)).activation_formula == found.activation_formula


def test_what_is_gathered_again_is_kept_as_a_shard() -> None:
    (block,) = [b for b in _plan("llama_gqa8", 2, "none").blocks if b.num_calls == 2]
    assert {tensor.policy for tensor in block.kept} == {"keep", "keep the shard"}
