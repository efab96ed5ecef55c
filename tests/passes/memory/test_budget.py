"""Whole models under a memory budget: peaks, numbers, texts."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.units import parse_bytes
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.graph_diff.diff import diff
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from sp_compiler.options import CompileOptions
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.recorder import Recorder
from sp_compiler.verification.verify import verify
from tests.helpers import parity
from tests.helpers.slow import slow
from tests.models import zoo


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
    return int(str(error.value).partition("the minimum that fits is ")[2].split()[0])


@functools.lru_cache(maxsize=16)
def _budgets(name: str, tp: int, count: int) -> list[int]:
    """From the least that does to the least that costs no time."""
    least = _least(_case(name), tp)
    most = step_memory(_program(name, tp, _MOST)).peak_bytes
    return [least + (most - least) * step // (count - 1) for step in range(count)]


_MODELS = [
    pytest.param("plain", 1, 3),
    *(
        slow(name, 2, count)
        # The least budget of Mixtral counts on an order of backward that lies below the given one.
        for name, count in (("plain", 5), ("mixtral", 3))
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


@pytest.mark.parametrize("name", ["plain", slow("llama")])
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


@pytest.mark.parametrize(
    ("name", "tp"), [("plain", 1), slow("plain", 2), slow("gpt2", 2), slow("llama", 2)]
)
def test_dropout_is_exact_at_every_budget(name: str, tp: int) -> None:
    """Gradients with dropout on are those without recomputation."""
    found = _case(name)
    true = parity.simulate(found, parity.compiled_in_turn(found, tp=tp, recompute="none"))
    for budget in _budgets(name, tp, 3):
        step = parity.simulate(found, _program(name, tp, budget))
        assert parity.gradient_error(step.grads, true.grads) < 1e-12


class _Dropouts(nn.Module):
    """Case in which torch's partitioner draws new masks: dropout between pointwise operators.

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


@pytest.mark.slow
def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    model, kwargs = zoo.build("plain"), zoo.inputs("plain")

    def planned(budget: Any) -> Plan:
        return plan(model, ((), kwargs), tp=2, recompute="auto", memory_budget=budget)

    with pytest.raises(ArgumentError, match=r"memory_budget=100 \(100 B\).*minimum.*needs") as e:
        planned(100)
    text = str(e.value).partition('("')[2].partition('")')[0]
    found = planned(text)
    assert found.activation_peak_bytes <= parse_bytes("memory_budget", text)
    report = str(found)
    assert "% used at the peak" in report
    assert "recomputes for" in report


def test_code_outside_of_layers_is_told_in_words() -> None:
    one = nn.Linear(8, 8)
    inputs: Any = ((torch.randn(4, 8),), {})
    with pytest.raises(ArgumentError, match="At this minimum the model needs the most memory"):
        plan(one, inputs, recompute="auto", memory_budget=1, tp=1)


def test_stages_and_code_of_a_block_that_is_split_in_several_ways() -> None:
    # Half way all blocks do alike; a quarter of the way one of them must recompute more.
    program = _program("plain", 1, _budgets("plain", 1, 5)[1])
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


@pytest.mark.parametrize("tp", [slow(1), 2])
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
    model = zoo.build("plain", layers=1, dropout=0.1, dtype=dtype)
    kwargs = zoo.inputs("plain")
    top = plan(model, ((), kwargs), tp=2, recompute="none").activation_peak_bytes
    report = verify(model, ((), kwargs), tp=2, recompute="auto", memory_budget=int(0.8 * top))
    assert report.ok, str(report)


@pytest.mark.parametrize(("recompute", "budget"), [("auto", None), ("full", "1GiB")])
def test_auto_and_a_budget_come_together(recompute: Any, budget: Any) -> None:
    with pytest.raises(ArgumentError, match='recompute="auto" needs a memory_budget'):
        CompileOptions(recompute=recompute, memory_budget=budget)
