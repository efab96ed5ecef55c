"""Layers on two half batches: what is split, what is refused, and numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from benchmarks.memory_check import measure
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.pass_report import Pass, PassReport, reporting
from sp_compiler.compiler import to_program
from sp_compiler.cost.hardware import H100, Link
from sp_compiler.cost.memory import backward_peak_bytes
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.captured import Captured
from sp_compiler.options import CompileOptions
from sp_compiler.passes.half_batches import half_batches, halves_pay
from sp_compiler.passes.memory import partition as partition_module
from sp_compiler.passes.memory.budget import BudgetError
from sp_compiler.passes.normalize import normalize
from sp_compiler.trace.export import capture
from tests.helpers.fake_group import fake_group
from tests.helpers.parity import (
    Case,
    assert_equal_gradients,
    case,
    compiled,
    output_error,
    simulate,
)
from tests.helpers.slow import slow
from tests.models import zoo

OPTIONS = CompileOptions(tp=2, half_batches=True)


class Layer(nn.Module):
    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(6) if mixes == "batch norm" else nn.LayerNorm(4)
        self.mixes = mixes

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x) + x.mean(0) if self.mixes == "mean" else self.norm(x)
        return x + F.gelu(self.up(y)).view(x.shape[0], 6, 4, 2).sum(-1) * mask


class Model(nn.Module):
    """An embedding, layers that share a mask, a norm, a head and a mean over the batch."""

    def __init__(self, mixes: str = "", num_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 4)
        self.layers = nn.ModuleList(Layer(mixes) for _ in range(num_layers))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.tokens(ids), (ids > 0).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def normalized(model: nn.Module, batch: int) -> Captured:
    captured = capture(model, (torch.zeros(batch, 6, dtype=torch.int64),), {})
    normalize(captured)
    return captured


def lines(captured: Captured) -> list[str]:
    """A line for each call: name, operator, operands, shape."""
    found = []
    for node in captured.module.graph.nodes:
        if node.op == "call_function":
            values = node.meta["val"]
            shape = [] if isinstance(values, (tuple, list)) else list(values.shape)
            name = node.target.__name__.partition(".")[0]
            found.append(re.sub(r"\bp_", "", f"{node.name} = {name}{node.args} {shape}"))
    return found


def split(model: nn.Module, batch: int = 4) -> tuple[Captured, PassReport]:
    captured = normalized(model, batch)
    with reporting(PassReport(Pass.HALF_BATCHES)) as report:
        half_batches(captured)
    return captured, report


def test_layers_are_split_and_joined_at_the_head() -> None:
    """The mask and the embedding are cut where they are made; parameters are shared."""
    captured, report = split(Model(num_layers=1))
    assert lines(captured) == [
        "embedding = embedding(tokens_weight, ids) [4, 6, 4]",
        "embedding_halves = split_with_sizes(embedding, [2, 2], -3) []",
        "embedding_0 = getitem(embedding_halves, 0) [2, 6, 4]",
        "embedding_1 = getitem(embedding_halves, 1) [2, 6, 4]",
        "gt = gt(ids, 0) [4, 6]",
        "unsqueeze = unsqueeze(gt, -1) [4, 6, 1]",
        "unsqueeze_halves = split_with_sizes(unsqueeze, [2, 2], -3) []",
        "unsqueeze_0 = getitem(unsqueeze_halves, 0) [2, 6, 1]",
        "unsqueeze_1 = getitem(unsqueeze_halves, 1) [2, 6, 1]",
        "layer_norm_0 = layer_norm(embedding_0, [4], layers_0_norm_weight, layers_0_norm_bias, 1e-05, False) [2, 6, 4]",  # noqa: E501
        "layer_norm_2 = layer_norm(embedding_1, [4], layers_0_norm_weight, layers_0_norm_bias, 1e-05, False) [2, 6, 4]",  # noqa: E501
        "linear_2_0 = linear(layer_norm_0, layers_0_up_weight) [2, 6, 8]",
        "linear_2_1 = linear(layer_norm_2, layers_0_up_weight) [2, 6, 8]",
        "add_1_0 = add(linear_2_0, layers_0_up_bias) [2, 6, 8]",
        "add_1_1 = add(linear_2_1, layers_0_up_bias) [2, 6, 8]",
        "gelu_0 = gelu(add_1_0,) [2, 6, 8]",
        "gelu_1 = gelu(add_1_1,) [2, 6, 8]",
        "view_0 = reshape(gelu_0, [2, 6, 4, 2]) [2, 6, 4, 2]",
        "view_3 = reshape(gelu_1, [2, 6, 4, 2]) [2, 6, 4, 2]",
        "sum_1_0 = sum(view_0, [-1]) [2, 6, 4]",
        "sum_1_1 = sum(view_3, [-1]) [2, 6, 4]",
        "mul_0 = mul(sum_1_0, unsqueeze_0) [2, 6, 4]",
        "mul_1 = mul(sum_1_1, unsqueeze_1) [2, 6, 4]",
        "add_0 = add(embedding_0, mul_0) [2, 6, 4]",
        "add_3 = add(embedding_1, mul_1) [2, 6, 4]",
        "layer_norm_1_0 = layer_norm(add_0, [4], norm_weight, norm_bias, 1e-05, False) [2, 6, 4]",
        "layer_norm_1_1 = layer_norm(add_3, [4], norm_weight, norm_bias, 1e-05, False) [2, 6, 4]",
        "layer_norm_3 = cat([layer_norm_1_0, layer_norm_1_1], -3) [4, 6, 4]",
        "linear_3 = linear(layer_norm_3, head_weight) [4, 6, 16]",
        "add_2 = add(linear_3, head_bias) [4, 6, 16]",
        "view_1 = reshape(add_2, [24, 16]) [24, 16]",
        "view_2 = reshape(ids, [24]) [24]",
        "cross_entropy_loss = cross_entropy_loss(view_1, view_2) []",
    ]
    assert all("val" in node.meta for node in captured.module.graph.nodes if node.op != "output")
    assert report.kinds["linear"] == 2
    assert not report.declined
    # Cut in front of the layers: all of them are one region.
    assert to_program(normalized(Model(), 4), OPTIONS).calls[1].path == "layers.0"


@pytest.mark.parametrize(
    ("mixes", "batch", "reason"),
    [
        (
            "batch norm",
            4,
            "_native_batch_norm_legit_functional mixes the batch, or is not known to keep its "
            "samples separate",
        ),
        ("mean", 4, "mean mixes the batch, or is not known to keep its samples separate"),
        ("", 5, "a batch of 5 has no equal halves"),
        ("", 1, "a batch of 1 has no equal halves"),
    ],
)
def test_what_is_not_split_stays_as_it_is(mixes: str, batch: int, reason: str) -> None:
    before = lines(normalized(Model(mixes), batch))
    captured, report = split(Model(mixes), batch)
    assert lines(captured) == before
    assert [each.reason for each in report.declined] == [reason]
    assert reason in captured.notes[-1]


def on_halves(
    name: str, batch: int, seq: int, p: float = 0.0, layers: int = 2
) -> tuple[Case, Case]:
    """A case with the program of the full batch, and with that of its halves."""
    full = case(name, batch, seq, p, layers=layers)
    model = zoo.build(name, dropout=p, layers=layers)
    captured = capture(model, (), zoo.inputs(name, batch, seq), lift_casts=True)
    halves = replace(full, program=to_program(captured, OPTIONS), latest=[])
    assert not halves.program.notes
    return full, halves


@pytest.mark.parametrize("name", ["plain", *map(slow, ("llama", "vit"))])
def test_gradients_are_those_of_the_full_batch(name: str) -> None:
    """Dropout drops the same elements; what differs is the order of sums over the batch."""
    # Two layers of the one that is a fast test: between them the halves stay apart.
    p, layers = 0.0 if name == "llama" else 0.2, 2 if name == "plain" else 1
    full, halves = on_halves(name, batch=4, seq=8, p=p, layers=layers)
    steps = [simulate(each, compiled(each, tp=2, recompute="selective")) for each in (full, halves)]
    assert output_error(steps[1], replace(full, outputs=steps[0].outputs)) < 1e-14
    assert_equal_gradients(steps[0], steps[1], 1e-15)


@pytest.mark.slow
def test_a_step_holds_what_was_planned() -> None:
    """To the byte, and less than with a sum of both gradients of every weight beside them."""
    _, halves = on_halves("plain", batch=4, seq=8)
    peaks = []
    for change in (partition_module.sum_in_place, lambda *args: None):
        with mock.patch.object(partition_module, "sum_in_place", change):
            program = compiled(halves, tp=2, recompute="full", overlap=False)
        memory = step_memory(program)
        with fake_group(2):
            assert measure(halves, program) == (memory.kept_bytes, memory.peak_bytes)
        block = program.regions["Block"].partitioned.backward
        assert block is not None
        peaks.append(backward_peak_bytes(block, program.program.own_parameters(2)[1]))
    assert peaks[0] < peaks[1]


@pytest.mark.slow
def test_auto_splits_where_communication_takes_long() -> None:
    sizes = {"vocab_size": 256, "num_positions": 64, "hidden_size": 64, "num_heads": 4}
    model = zoo.plain_gpt(num_layers=2, **sizes)
    ids = torch.zeros(4, 64, dtype=torch.int64)
    faster = []
    for gb_per_s in (1e9, 150.0):
        links = {kind: Link(0.0, gb_per_s) for kind in H100.interconnect}
        full, auto = (
            sp_compiler.plan(
                model, ((ids,), {"labels": ids}), tp=2,
                hardware=replace(H100, interconnect=links), half_batches=halves,
            )
            for halves in (False, "auto")
        )  # fmt: skip
        faster.append(auto.step_us < full.step_us)
        assert auto.activation_peak_bytes <= full.activation_peak_bytes
    assert faster == [False, True]


@pytest.mark.parametrize(
    ("step_us", "num_bytes", "budget_bytes", "pays"),
    [
        (98.0, 10, None, True),
        (99.5, 10, None, False),
        (98.0, 11, None, False),
        (98.0, 11, 11, True),
        (98.0, 12, 11, False),
    ],
)
def test_what_auto_asks_of_halves(
    step_us: float, num_bytes: int, budget_bytes: int | None, pays: bool
) -> None:
    """Time, and memory within that of the full batch or the user's budget."""

    def plan(step_us: float, num_bytes: int) -> Any:
        schedule = SimpleNamespace(step_us=step_us)
        return SimpleNamespace(schedule=schedule, activation_peak_bytes=num_bytes)

    assert halves_pay(plan(step_us, num_bytes), plan(100.0, 10), budget_bytes) is pays


@pytest.mark.slow
def test_auto_takes_the_halves_where_the_full_batch_does_not_fit() -> None:
    """And tells the lesser of what the two need."""
    inputs: Any = ((torch.zeros(4, 6, dtype=torch.int64),), {})

    def planned(halves: Any, budget_bytes: int) -> sp_compiler.Plan:
        options: dict[str, Any] = {"recompute": "auto", "memory_budget": budget_bytes}
        return sp_compiler.plan(Model(), inputs, tp=2, half_batches=halves, **options)

    least = {}
    for halves in (True, False, "auto"):
        with pytest.raises(BudgetError) as refused:
            planned(halves, 1)
        least[halves] = refused.value.least_bytes
    assert least["auto"] == least[True] < least[False]
    assert planned("auto", least[True]).activation_peak_bytes <= least[True]


def test_pipelines_refuse_half_batches() -> None:
    with pytest.raises(ArgumentError, match="half_batches=True: pipelines"):
        CompileOptions(tables_apart=True, half_batches=True)
    with pytest.raises(ArgumentError, match="half_batches=2: expected one of True, False, 'auto'"):
        CompileOptions(half_batches=2)  # type: ignore[arg-type]
