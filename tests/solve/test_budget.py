"""Recompute under a memory budget: solvers, peaks, numbers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Recorder
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.storage import Storage
from sp_compiler.base.units import parse_bytes
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.estimate import plan
from sp_compiler.graph_diff.diff import diff
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from sp_compiler.options import CompileOptions
from sp_compiler.passes.compile_region import differentiate
from sp_compiler.passes.memory.candidates import problem
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.runtime.executor import Executor
from sp_compiler.solve.memory_budget import CallSplits, Split, cheapest, peak_bytes, smallest
from sp_compiler.solve.recompute_frontier import Choice, ForwardValue, evaluate, frontier
from sp_compiler.solve.recompute_frontier import cheapest as cheapest_kept
from sp_compiler.trace.joint import JointGraph
from sp_compiler.verification.verify import verify
from tests.helpers import parity
from tests.helpers.regions import region_of
from tests.models import zoo

# What to keep, against every subset.


@st.composite
def _forwards(draw: st.DrawFn) -> list[ForwardValue]:
    values = []
    for index in range(draw(st.integers(2, 8))):
        parents = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        values.append(
            ForwardValue(
                parents=tuple(sorted(parents)),
                num_bytes=draw(st.sampled_from([0, 2, 8, 8, 64, 1000])) * 12345,
                time_us=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 100.0])),
                needed=draw(st.booleans()),
                can_keep=draw(st.integers(0, 5)) > 0,
                can_repeat=draw(st.integers(0, 5)) > 0,
            )
        )
    return values


def _subsets(values: Sequence[ForwardValue]) -> list[Choice]:
    """What every allowed set of kept values costs."""
    keepable = [index for index, value in enumerate(values) if value.can_keep]
    sets = itertools.chain.from_iterable(
        itertools.combinations(keepable, size) for size in range(len(keepable) + 1)
    )
    return [found for each in sets if (found := evaluate(values, frozenset(each))) is not None]


def _assert_solved(values: Sequence[ForwardValue]) -> None:
    every = _subsets(values)
    for limit in sorted({0, *(choice.num_bytes for choice in every)})[:12]:
        fitting = [(c.time_us, c.num_bytes) for c in every if c.num_bytes <= limit]
        found = cheapest_kept(values, limit)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert (found.time_us, found.num_bytes) == pytest.approx(min(fitting), rel=1e-9)
    for choice in frontier(values):
        assert not any(
            c.time_us < choice.time_us and c.num_bytes <= choice.num_bytes for c in every
        )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(_forwards())
def test_choices_are_those_of_brute_force(values: list[ForwardValue]) -> None:
    _assert_solved(values)


class _Small(nn.Module):
    """Norm, linear, activation, dropout and a residual: 14 values that may be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        gate = torch.sigmoid(hidden) * hidden.exp()
        return x + torch.tanh(self.down(gate * hidden))


def _small() -> JointGraph:
    return differentiate(region_of(_Small(), torch.randn(32, 16)))


def test_a_block_of_up_to_fourteen_candidates_is_solved_like_brute_force() -> None:
    _, values = problem(_small(), 1)
    assert 10 <= sum(value.can_keep for value in values) <= 14
    _assert_solved(values)


# How to split every call, against every assignment.


@st.composite
def _steps(draw: st.DrawFn) -> list[CallSplits]:
    rng = draw(st.randoms(use_true_random=False))
    calls = range(rng.randint(1, 5))
    results = [
        Storage(("forward", i, f"out{k}"), rng.choice([5, 10, 30])) for i in calls for k in (0, 1)
    ]

    def some(index: int, most: int) -> frozenset[Storage]:
        there = [storage for storage in results if storage.owner[1] <= index]
        return frozenset(rng.sample(there, rng.randint(0, min(most, len(there)))))

    return [
        CallSplits(
            tuple(
                Split(
                    rng.choice([0.0, 1.0, 2.0, 5.0, 5.0]),
                    rng.choice([0, 3, 7, 20]),
                    some(index, 2),
                    rng.randint(0, 30),
                    rng.randint(0, 30),
                )
                for _ in range(rng.randint(1, 4))
            ),
            frozenset({some(index, 3)}),
            frozenset({some(index, 3), some(index, 3)}),
            frozenset({some(index, 3)} if rng.random() < 0.7 else ()),
        )
        for index in calls
    ]


def _us(calls: Sequence[CallSplits], picks: Sequence[int]) -> float:
    return sum(call.splits[pick].time_us for call, pick in zip(calls, picks, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_steps())
def test_assignments_are_those_of_brute_force(calls: list[CallSplits]) -> None:
    every = [
        (_us(calls, picks), peak_bytes(calls, picks))
        for picks in itertools.product(*(range(len(call.splits)) for call in calls))
    ]
    assert peak_bytes(calls, smallest(calls)) == min(peak for _, peak in every)
    for limit in range(20, 200, 15):
        best = min((each for each in every if each[1] <= limit), default=None)
        picks = cheapest(calls, limit)
        assert (picks and (_us(calls, picks), peak_bytes(calls, picks))) == best


# Whole models.


@functools.lru_cache(maxsize=4)
def _case(name: str) -> parity.Case:
    """With dropout on."""
    if name != "mixtral":
        return parity.case(name, 2, 12, 0.1)
    config = transformers.MixtralConfig(
        vocab_size=zoo.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
        attention_dropout=0.1, attn_implementation="eager", experts_implementation="batched_mm",
        pad_token_id=None, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double().train()
    return parity.make_case(model, zoo.inputs("llama"))


_MOST = 10**12


@functools.lru_cache(maxsize=16)
def _program(name: str, tp: int, budget: int) -> CompiledProgram:
    return parity.compiled_in_turn(_case(name), tp=tp, recompute="auto", memory_budget=budget)


def _plan(name: str, tp: int, **options: Any) -> Plan:
    if "memory_budget" in options:
        program = _program(name, tp, options["memory_budget"])
        options["recompute"] = "auto"
    else:
        program = parity.compiled_in_turn(_case(name), tp=tp, **options)
    return make_plan(program, CompileOptions(tp=tp, **options))


def _least(found: parity.Case, tp: int) -> int:
    """The smallest budget that does."""
    with pytest.raises(ArgumentError, match="memory_budget") as error:
        parity.compiled_in_turn(found, tp=tp, recompute="auto", memory_budget=1)
    return int(str(error.value).partition("the least that would do is ")[2].split()[0])


@functools.lru_cache(maxsize=16)
def _budgets(name: str, tp: int, count: int) -> list[int]:
    """From the least that does to the least that costs no time."""
    least = _least(_case(name), tp)
    most = step_memory(_program(name, tp, _MOST)).peak_bytes
    return [least + (most - least) * step // (count - 1) for step in range(count)]


_MODELS = [
    pytest.param("plain", 1, 3),
    *(
        pytest.param(name, 2, count, marks=pytest.mark.slow)
        for name, count in (("plain", 5), ("llama", 3), ("mixtral", 3))
    ),
]


@pytest.mark.parametrize(("name", "tp", "count"), _MODELS)
def test_a_smaller_budget_has_no_larger_peak_and_takes_no_less_time(
    name: str, tp: int, count: int
) -> None:
    budgets = _budgets(name, tp, count)
    plans = [_plan(name, tp, memory_budget=budget) for budget in budgets]
    for budget, found in zip(budgets, plans, strict=True):
        assert found.activation_peak_bytes <= budget
    for less, more in itertools.pairwise(plans):
        assert less.activation_peak_bytes <= more.activation_peak_bytes
        assert less.step_us >= more.step_us * (1 - 1e-12)
    assert plans[0].activation_peak_bytes == budgets[0], "the least that does is not used up"
    assert plans[0].step_us > plans[-1].step_us
    fastest = min(_plan(name, tp, recompute=each).step_us for each in ("none", "selective"))
    assert plans[-1].step_us <= fastest


@pytest.mark.parametrize("name", ["plain", pytest.param("llama", marks=pytest.mark.slow)])
def test_planned_is_what_is_kept(name: str) -> None:
    found = _case(name)
    for budget in _budgets(name, 1, 3):
        program = _program(name, 1, budget)
        params = {
            key: value.detach().clone().requires_grad_() for key, value in found.params.items()
        }
        with Recorder() as recorder:
            run = Executor(program, Communicator(None, 0, 1)).run(
                params, found.buffers, found.inputs, parity.SEED
            )
        outside = [*params.values(), *found.buffers.values(), *found.inputs, *run.outputs]
        tensors = [value for value in outside if isinstance(value, Tensor)]
        assert recorder.alive_bytes(excluding=tensors) == step_memory(program).kept_bytes


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama"))],
)
def test_dropout_is_exact_at_every_budget(name: str, tp: int) -> None:
    """Gradients with dropout on are those without recomputation."""
    found = _case(name)
    true = parity.simulate(found, parity.compiled_in_turn(found, tp=tp, recompute="none"))
    for budget in _budgets(name, tp, 3):
        step = parity.simulate(found, _program(name, tp, budget))
        assert parity.gradient_error(step.grads, true.grads) < 1e-12


class _Dropouts(nn.Module):
    """Where torch's partitioner draws new masks: dropout between pointwise operators.

    With ``activation_memory_budget`` 0.2 torch 2.13 has gradients off by 144 % here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.tanh(self.up(x)), 0.5, self.training)
        return F.dropout(torch.sin(self.down(hidden * hidden)), 0.5, self.training).square().sum()


def test_masks_are_not_drawn_again_in_backward() -> None:
    """The least budget recomputes what is dropped; what comes of redrawing is far off."""
    torch.manual_seed(0)
    model, x = _Dropouts().double(), torch.randn(8, 16, dtype=torch.float64)
    found = parity.make_case(model, {"x": x})
    budget = _least(found, 1)
    program = parity.compiled(found, tp=1, recompute="auto", memory_budget=budget)
    again = [
        node.name
        for region in program.regions.values()
        for node in region.partitioned.backward.nodes
        if node.meta.get("recomputed") and "dropout" in str(node.target)
    ]
    assert again
    step = parity.simulate(found, program)
    assert parity.gradient_error(step.grads, found.grads) < 1e-12
    other = parity.simulate(found, program, parity.SEED + 1)
    assert parity.gradient_error(other.grads, found.grads) > 1e-2


def test_what_is_recomputed_stands_just_before_its_use() -> None:
    program = _program("plain", 1, _least(_case("plain"), 1))
    count = 0
    for region in program.regions.values():
        graph = region.partitioned.step_backward
        order = {node: index for index, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.meta.get("recomputed"):
                first = min((user for user in node.users), key=order.__getitem__)
                between = list(graph.nodes)[order[node] + 1 : order[first]]
                assert all(other.meta.get("recomputed") for other in between), node
                count += 1
    assert count > 10


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    model, kwargs = zoo.build("plain"), zoo.inputs("plain")

    def planned(budget: Any) -> Plan:
        return plan(model, ((), kwargs), tp=2, recompute="auto", memory_budget=budget)

    with pytest.raises(ArgumentError, match=r"memory_budget=100 \(100 B\).*least.*needs most") as e:
        planned(100)
    text = str(e.value).partition('("')[2].partition('")')[0]
    found = planned(text)
    assert found.activation_peak_bytes <= parse_bytes("memory_budget", text)
    report = str(found)
    assert "% used at the peak" in report
    assert "computes again for" in report


def test_stages_and_code_of_a_block_that_is_split_in_several_ways() -> None:
    program = _program("plain", 1, _budgets("plain", 1, 3)[1])
    names = [call.region.name for call in program.program.calls]
    assert len(set(names)) == len(program.program.regions) > 3, "all blocks are split alike"
    for name in names:
        assert f"class {name}:" in program.code
    for stage in ("capture", "shard", "final"):
        assert set(program.stages[stage].graphs) == set(names)
    sections = diff(program.stages["shard"], program.stages["final"]).sections
    assert {section.kind for section in sections} <= {"changed"}


class _Layers(nn.Module):
    """Returns what each of its layers made, as a model with ``output_hidden_states`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return states


@pytest.mark.parametrize("tp", [1, 2])
def test_values_of_repeated_blocks_that_the_model_returns(tp: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
    found = parity.make_case(_Layers().double(), {"x": x})
    for budget in (_least(found, tp), _MOST):
        program = parity.assert_parity(found, tp=tp, recompute="auto", memory_budget=budget)
        assert len(program.stages["shard"].calls) == len(program.stages["capture"].calls) + 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verify_takes_a_budget(dtype: torch.dtype) -> None:
    model = zoo.build("plain", dropout=0.1, dtype=dtype)
    kwargs = zoo.inputs("plain")
    top = plan(model, ((), kwargs), tp=2, recompute="none").activation_peak_bytes
    report = verify(model, ((), kwargs), tp=2, recompute="auto", memory_budget=int(0.8 * top))
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        (5, 5),
        ("7B", 7),
        ("1KiB", 1024),
        ("1.5 GiB", 3 << 29),
        (" 12GiB ", 12 << 30),
        (".5TiB", 1 << 39),
    ],
)
def test_sizes(size: int | str, num_bytes: int) -> None:
    assert parse_bytes("memory_budget", size) == num_bytes


@pytest.mark.parametrize(
    "size",
    [
        "12 GB",
        "12",
        "GiB",
        "12gib",
        "-1GiB",
        "0GiB",
        "1e3GiB",
        "12 GiB/s",
        "",
        0,
        -1,
        True,
        1.5,
        b"1B",
    ],
)
def test_other_sizes_are_refused(size: Any) -> None:
    with pytest.raises(ArgumentError, match=r'memory_budget=.*expected a positive number.*"12GiB"'):
        CompileOptions(recompute="auto", memory_budget=size)


@pytest.mark.parametrize(("recompute", "budget"), [("auto", None), ("full", "1GiB")])
def test_auto_and_a_budget_come_together(recompute: Any, budget: Any) -> None:
    with pytest.raises(ArgumentError, match='recompute="auto" needs a memory_budget'):
        CompileOptions(recompute=recompute, memory_budget=budget)
