"""Collectives of the graphs that run and of their run, and their layout.

Where numbers of tokens divide, a block of two sublayers costs two all-gathers and two
reduce-scatters forward, and backward their duals and two gathers of what was kept as a shard.
"""

from __future__ import annotations

import collections
import functools
import pprint
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.op_traits import collective_of, has_inner_communication, is_view
from sp_compiler.verification import simulate
from tests.helpers import parity
from tests.helpers.collective_counts import (
    ELSEWHERE,
    RECOMPUTED,
    SEQUENCE_PARALLEL,
    TENSOR_PARALLEL,
)
from tests.helpers.slow import slow, slow_but
from tests.models import zoo

_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}
_FAST = ("gpt2", "vit")
_MODELS = slow_but(_FAST, SEQUENCE_PARALLEL)
# What they have and others lack, neither recomputation nor tensor parallelism treats otherwise.
_ALIKE = ("gpt2_logits", "llama_gqa8", "encoder_causal", "encoder_prenorm", "peft_llama")
_DIFFERENT = slow_but(_FAST, [name for name in SEQUENCE_PARALLEL if name not in _ALIKE])
# One layer; where the first differs from the others, two.
_LAYERS = {"t5": 2, "lora": 2, "peft_gpt2": 2, "peft_llama": 2}

Counts = dict[str, tuple[str, str]]
"""Region to collectives of its forward and of its backward."""


@functools.lru_cache(maxsize=64)
def _compiled(name: str, **options: Any) -> CompiledProgram:
    return parity.compiled_in_turn(_case(name), tp=2, **options)


def _case(name: str) -> parity.Case:
    return parity.case(name, 4, 16, layers=_LAYERS.get(name, 1))


def _count(graph: Graph | None) -> collections.Counter[str]:
    """Collectives of a graph; a vocabulary-parallel loss is "VL", two small all-reduces inside."""
    found: collections.Counter[str] = collections.Counter()
    for node in graph.nodes if graph is not None else ():
        method = collective_of(node)
        if method in _SHORT:
            found[_SHORT[method]] += 1
        if has_inner_communication(node):
            found["VL"] += 1
    return found


def _text(found: collections.Counter[str]) -> str:
    return " ".join(f"{count} {kind}" for kind, count in sorted(found.items()))


def _counts(program: CompiledProgram) -> Counts:
    return {
        name: (_text(_count(parts.forward)), _text(_count(parts.backward)))
        for name, region in program.regions.items()
        for parts in [region.partitioned]
    }


@pytest.mark.parametrize("name", _MODELS)
def test_sequence_parallel(name: str) -> None:
    assert _counts(_compiled(name)) == SEQUENCE_PARALLEL[name]


@pytest.mark.parametrize("recompute", ["none", "attention"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_recompute_without_collectives(name: str, recompute: str) -> None:
    """Only the gathers of what is kept as a shard come again, whatever else is recomputed."""
    assert _counts(_compiled(name, recompute=recompute)) == SEQUENCE_PARALLEL[name]


@pytest.mark.parametrize("name", _DIFFERENT)
def test_full_recompute(name: str) -> None:
    """The re-run of a block repeats its gathers and what is reduced before its last value."""
    counts = _counts(_compiled(name, recompute="full"))
    forward = {region: text for region, (text, _) in SEQUENCE_PARALLEL[name].items()}
    assert {region: text for region, (text, _) in counts.items()} == forward
    assert {region: text for region, (_, text) in counts.items()} == RECOMPUTED[name]


@pytest.mark.parametrize("name", _DIFFERENT)
def test_tensor_parallel_alone(name: str) -> None:
    assert _counts(_compiled(name, sequence_parallel=False)) == TENSOR_PARALLEL[name]


_KINDS = {
    "all_gather_into_tensor": "AG",
    "reduce_scatter_tensor": "RS",
    "all_reduce": "AR",
    "all_reduce_": "AR",
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", [slow("gpt2"), "bert", slow("lora")])
def test_what_runs_is_what_the_graphs_say(
    name: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one all-reduce for the gradients of all replicated parameters."""
    found = _case(name)
    program = _compiled(name) if sequence_parallel else _compiled(name, sequence_parallel=False)
    ran: list[str] = []
    collective, backward = simulate._collective, simulate._backward

    def count(func: Any, args: tuple[Any, ...]) -> Any:
        kind = func._schema.name.split("::")[1]
        ran.extend([_KINDS[kind]] if kind in _KINDS else [])
        return collective(func, args)

    def mark(*args: Any) -> None:
        ran.append("backward")
        backward(*args)

    monkeypatch.setattr(simulate, "_collective", count)
    monkeypatch.setattr(simulate, "_backward", mark)
    parity.simulate(found, program)
    cut = ran.index("backward")
    forward, back = _expected(program)
    assert collections.Counter(ran[:cut]) == forward
    assert collections.Counter(ran[cut + 1 :]) == back


def _expected(program: CompiledProgram) -> tuple[collections.Counter[str], ...]:
    forward: collections.Counter[str] = collections.Counter()
    backward: collections.Counter[str] = collections.Counter()
    bucket = False
    for call in program.program.calls:
        parts = program.regions[call.region.name].partitioned
        forward += _count(parts.forward)
        backward += _count(parts.backward)
        bucket |= any(
            ref.kind == "param" and placement.kind == "R" and node.meta["requires_grad"]
            for ref, placement, node in zip(
                call.args, call.region.input_placements, call.region.placeholders, strict=True
            )
        )
    forward["AR"] += 2 * forward.pop("VL", 0)
    backward["AR"] += bucket
    return +forward, +backward


# Layout.

_COPIES = ("clone", "cat.", "pad", "slice", "permute", "transpose", "_to_copy")


@pytest.mark.parametrize("name", _MODELS)
def test_collectives_on_rows_copy_nothing(name: str) -> None:
    """Gathers and scatters take and give contiguous rows: nothing is moved around them."""
    for region, compiled in _compiled(name).regions.items():
        parts = compiled.partitioned
        for graph in (parts.forward, parts.backward):
            for node in graph.nodes if graph is not None else ():
                if collective_of(node) in ("all_gather", "reduce_scatter"):
                    _assert_plain(node, ELSEWHERE.get(name, {}).get(region, ()))


def _assert_plain(node: Node, inner: tuple[str, ...]) -> None:
    if "S(0)" not in node.args[1:3]:
        assert f"{node.args[1]} -> {node.args[2]}" in inner
        return
    operand = node.args[0]
    assert isinstance(operand, Node)
    assert operand.meta["val"].is_contiguous()
    assert node.meta["val"].is_contiguous()
    neighbours = [_source(operand), *_readers(node)]
    assert not [str(n) for n in neighbours if _is_copy(n)]


def _is_copy(node: Node) -> bool:
    return any(word in str(node.target) for word in _COPIES)


def _source(node: Node) -> Node:
    while is_view(node) and not _is_copy(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.op == "call_function" and is_view(user) and not _is_copy(user):
            yield from _readers(user)
        elif user.op == "call_function":
            yield user


# Padding.


class _Unsafe(nn.Module):
    """Rows are divided by their own length, which makes a row of zeros NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        normed = x / x.norm(dim=-1, keepdim=True) * self.scale
        return x + self.down(F.gelu(self.up(normed)))


class _UnsafeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(_Unsafe() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("tp", [2, 4])
def test_padded_rows_make_no_nan(tp: int) -> None:
    """15 tokens: the last rows repeat the last token; they add nothing to any gradient."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _UnsafeModel().double()
        ids = torch.randint(0, 32, (3, 5))
    found = parity.make_case(model, {"ids": ids})
    program = parity.assert_parity(found, tp=tp)
    (block,) = [call.region for call in program.program.calls if call.path == "blocks.0"]
    norms = [n for n in block.module.graph.nodes if "norm" in str(n.target)]
    assert [str(node.meta["placement"]) for node in norms] == ["S(0)"]


def _print_tables() -> None:
    """Contents of ``collective_counts.py``; of models without a loss one is enough."""
    names = [name for name in zoo.names() if name not in ("llama_logits", "plain_logits")]
    different = [name for name in names if name not in _ALIKE]
    tables: dict[str, dict[str, Any]] = {
        "SEQUENCE_PARALLEL": {name: _counts(_compiled(name)) for name in names},
        "RECOMPUTED": {
            name: {
                region: backward
                for region, (_, backward) in _counts(_compiled(name, recompute="full")).items()
            }
            for name in different
        },
        "TENSOR_PARALLEL": {
            name: _counts(_compiled(name, sequence_parallel=False)) for name in different
        },
    }
    for title, table in tables.items():
        print(title, "=", pprint.pformat(table, width=96, sort_dicts=False))


if __name__ == "__main__":
    _print_tables()
