"""Plans: what is counted, that it is what runs, and how it reads."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import re
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

from benchmarks.models import GPTConfig, PlainGPT
from sp_compiler.api import plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.shards import local_part
from sp_compiler.cost.memory import backward_peak_bytes, function_peak_bytes
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.rewriting import fake_value
from sp_compiler.ops.communicator import Communicator
from sp_compiler.options import CompileOptions, Dropout, Options
from sp_compiler.planning.build import make_plan
from sp_compiler.planning.plan import Plan
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.recorder import Recorder
from tests.helpers.graph_builder import GraphBuilder
from tests.helpers.parity import SEED, case, compiled, compiled_in_turn, make_case
from tests.helpers.ranks import run_on_ranks
from tests.helpers.slow import slow
from tests.models import zoo

aten = torch.ops.aten


@functools.cache
def _plan(name: str, tp: int = 2, p: float = 0.0, **options: Any) -> Plan:
    model = zoo.build(name, dropout=p)
    return plan(model, ((), zoo.inputs(name)), tp=tp, **options)


def _plan_in_turn(recompute: str, p: float = 0.0) -> Plan:
    """That of the plain GPT on two ranks; settings of one model share all but its memory."""
    program = compiled_in_turn(case("plain", 2, 12, p), tp=2, recompute=recompute)
    return make_plan(program, CompileOptions(tp=2, recompute=recompute), "PlainGPT")


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("plain", "stored"),
        ("gpt2", "regenerate"),
        *(slow(name, "stored") for name in ("llama", "gpt2", "t5")),
        slow("plain", "regenerate"),
    ],
)
def test_planned_is_what_one_rank_keeps(name: str, dropout: str) -> None:
    """Storages alive after a forward, without parameters, buffers, inputs and outputs."""
    model = zoo.build(name, layers=2, dropout=0.1)
    found = make_case(model, zoo.inputs(name), dropout=cast(Dropout, dropout))
    for recompute in ("none", "attention", "selective", "full"):
        program = compiled_in_turn(found, tp=1, recompute=recompute, dropout=dropout)
        params = {
            key: value.detach().clone().requires_grad_(value.requires_grad)
            for key, value in found.params.items()
        }
        with Recorder() as recorder:
            run = Executor(program, Communicator(None, 0, 1)).run(
                params, found.buffers, found.inputs, SEED
            )
        outside = [*params.values(), *found.buffers.values(), *found.inputs, *run.outputs]
        outside += program.program.constants.values()
        tensors = [value for value in outside if isinstance(value, Tensor)]
        assert recorder.alive_bytes(excluding=tensors) == step_memory(program).kept_bytes


def _kept_on_a_rank() -> tuple[int, int]:
    found = case("gpt2", 2, 12)
    program = compiled(found, tp=2)
    group = dist.group.WORLD
    assert group is not None
    rank = dist.get_rank()
    placed = program.param_placements
    params = {
        key: local_part(value.detach(), placed[key], rank, 2).requires_grad_()
        for key, value in found.params.items()
    }
    with Recorder() as recorder:
        run = Executor(program, Communicator(group, rank, 2)).run(
            params, found.buffers, found.inputs, SEED
        )
    outside = [*params.values(), *found.buffers.values(), *found.inputs, *run.outputs]
    outside += program.program.constants.values()
    tensors = [value for value in outside if isinstance(value, Tensor)]
    return recorder.alive_bytes(excluding=tensors), step_memory(program).kept_bytes


@pytest.mark.slow
def test_planned_is_what_two_real_ranks_keep() -> None:
    for measured, planned in run_on_ranks(2, _kept_on_a_rank):
        assert measured == planned


def test_blocks_add_up_to_the_whole() -> None:
    found = _plan_in_turn("none")
    own = sum(block.kept_bytes * block.num_calls for block in found.blocks)
    assert found.activation_bytes == own
    (block,) = [block for block in found.blocks if block.num_calls > 1]
    assert block.paths == ("blocks.0", "blocks.1")


@pytest.mark.slow
def test_what_several_calls_keep_counts_once() -> None:
    """Every layer of a Llama multiplies by the same rotary tables."""
    found = _plan("llama", recompute="none")
    (block,) = [block for block in found.blocks if block.num_calls == 2]
    shared = [tensor for tensor in block.kept if tensor.shared == "shared"]
    assert {tensor.shape[-1] for tensor in shared} == {8}
    own = sum(each.kept_bytes * each.num_calls for each in found.blocks)
    assert found.activation_bytes == own + sum(tensor.num_bytes for tensor in shared)


def test_what_the_model_returns_is_not_kept() -> None:
    found = _plan("plain", tp=1)
    logits = [t for block in found.blocks for t in block.kept if t.shared == "returned"]
    assert [tensor.shape for tensor in logits] == [(24, zoo.VOCAB)]
    assert found.returned_bytes == logits[0].num_bytes + 8  # and the loss


def test_state_of_one_rank() -> None:
    model = zoo.build("plain")
    found = plan(model, ((), zoo.inputs("plain")), tp=2)
    total = sum(parameter.numel() for parameter in model.parameters())
    whole = found.replicated_parameter_bytes
    assert found.parameter_bytes == (8 * total + whole) / 2
    assert found.gradient_bytes == found.parameter_bytes
    assert found.optimizer_bytes == 2 * found.parameter_bytes
    assert 0 < whole < 8 * 1000  # norms and biases
    assert found.total_bytes == 4 * found.parameter_bytes + found.activation_peak_bytes


@pytest.mark.slow
def test_frozen_weights_have_no_gradients() -> None:
    trained = [p for p in zoo.build("lora").parameters() if p.requires_grad]
    whole_bytes = sum(parameter.nbytes for parameter in trained)
    found = _plan("lora")
    assert whole_bytes / 2 <= found.gradient_bytes <= whole_bytes < found.parameter_bytes
    assert found.optimizer_bytes == 2 * found.gradient_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_optimizers_state_is_what_torch_keeps(dtype: torch.dtype) -> None:
    model, inputs = zoo.build("plain", dtype=dtype), zoo.inputs("plain")
    found = plan(model, ((), inputs), tp=1)
    optimizer = torch.optim.AdamW(model.parameters())
    zoo.loss_of(model(**inputs)).backward()
    optimizer.step()
    moments = [
        state[name] for state in optimizer.state.values() for name in state if name != "step"
    ]
    assert found.optimizer_bytes == sum(moment.nbytes for moment in moments)
    assert found.gradient_bytes == sum(
        p.grad.nbytes for p in model.parameters() if p.grad is not None
    )


def _counts(found: Plan, name: str) -> tuple[dict[str, int], dict[str, int]]:
    block = found.block(name)
    return (
        {item.kind: item.count for item in block.forward},
        {item.kind: item.count for item in block.backward},
    )


@pytest.mark.parametrize("recompute", ["none", "attention", "selective"])
def test_collectives_of_a_block_are_the_papers(recompute: str) -> None:
    """Two gathers and two scatters each way, and two gathers of what only a shard is kept of."""
    forward, backward = _counts(_plan_in_turn(recompute), "Block")
    assert forward == {"all_gather": 2, "reduce_scatter": 2}
    assert backward == {"all_gather": 4, "reduce_scatter": 2}


def test_collectives_without_sequence_parallelism() -> None:
    found = _plan("plain", recompute="none", sequence_parallel=False)
    assert _counts(found, "Block") == ({"all_reduce": 2}, {"all_reduce": 2})
    size = 2 * 12 * 32 * 8
    assert [item.num_bytes for item in found.block("Block").forward] == [2 * size]


@pytest.mark.slow
def test_replicated_gradients_are_reduced_in_one_bucket() -> None:
    found = _plan("plain")
    (bucket,) = found.gradient_reduction
    assert (bucket.kind, bucket.count) == ("all_reduce", 1)
    assert bucket.num_bytes <= found.replicated_parameter_bytes
    per_kind = {item.kind: item.count for item in found.collectives}
    in_blocks = sum(
        item.count * block.num_calls
        for block in found.blocks
        for item in (*block.forward, *block.backward)
        if item.kind == "all_reduce"
    )
    assert per_kind["all_reduce"] == in_blocks + 1
    assert _plan("plain", tp=1).collectives == ()


def test_flops_are_the_papers() -> None:
    """72 B L s h^2 (1 + s/(6h) + v/(12hL)) for the model (arXiv 2205.05198, appendix A)."""
    h, s, b, v, layers = 32, 12, 2, zoo.VOCAB, 2
    expected = 72 * b * layers * s * h * h * (1 + s / (6 * h) + v / (12 * h * layers))
    for recompute, repeated in (("none", 0.0), ("selective", 2 * b * s * s * h * layers)):
        found = _plan_in_turn(recompute, 0.1)
        assert 2 * found.work.model_flops == pytest.approx(expected)
        assert 2 * found.work.hardware_flops == pytest.approx(expected + repeated)
    assert found.work.recompute_us > 0
    assert 0 < found.mfu < 1


def test_fallbacks_say_why() -> None:
    found = _plan("plain")
    assert found.fallbacks == ()

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).cumsum(-1)

    found = plan(Odd(), ((torch.randn(4, 3, 5),), {}), tp=2)
    text = "\n".join(found.fallbacks)
    assert "parameter inner.weight is replicated: (7x5) no dim is divisible by 2" in text


class _Forgets(nn.Linear):
    """Computes, and returns nothing."""

    def forward(self, input: Tensor) -> None:  # type: ignore[override]
        super().forward(input)


@pytest.mark.parametrize(
    ("model_class", "is_trained", "count"),
    [(_Forgets, True, 1), (nn.Linear, True, 0), (nn.Linear, False, 1)],
)
def test_a_model_without_a_backward_is_noted(
    model_class: type[nn.Linear], is_trained: bool, count: int
) -> None:
    model = model_class(4, 4).requires_grad_(is_trained)
    notes = plan(model, ((torch.randn(2, 4),), {}), tp=2).notes
    # Of a frozen model too, whose result does depend on its parameters.
    expected = "none of the model's outputs requires a gradient: there is no backward"
    assert notes.count(expected) == count


@pytest.mark.parametrize(
    ("name", "p", "options", "count"),
    [
        ("plain", 0.0, {"tp": 1, "half_batches": True, "async_tp": True}, 2),
        ("plain", 0.0, {"async_tp": True, "loss_chunks": 2, "attention_chunks": 2}, 3),
        slow("lora", 0.0, {"loss_chunks": 2}, 0),
        ("encoder", 0.1, {"attention_chunks": 2}, 1),
        slow("plain", 0.0, {"recompute": "auto", "memory_budget": "1GiB", "offload": True}, 1),
    ],
)
def test_options_that_change_nothing_are_noted(
    name: str, p: float, options: dict[str, Any], count: int
) -> None:
    notes = _plan(name, p=p, **options).notes
    expected = r"(changes nothing (here: .{30}|on one rank)|sends nothing to the host)"
    assert len([note for note in notes if re.search(expected, note)]) == count, notes


@pytest.mark.slow
def test_overlap_hides_a_part_of_the_communication() -> None:
    hidden, exposed = _plan("plain"), _plan("plain", overlap=False)
    assert exposed.work.hidden_us == pytest.approx(0, abs=1e-9)
    assert 0 < hidden.work.hidden_us < hidden.work.communication_us
    assert hidden.work.communication_us == exposed.work.communication_us
    assert hidden.step_us == pytest.approx(exposed.step_us - hidden.work.hidden_us, rel=1e-12)


def test_report_shows_repeated_blocks_once() -> None:
    found = _plan("plain")
    text = str(found)
    assert "PlainGPT on 2 tensor-parallel ranks" in text
    assert text.count("Block x 2: blocks.0, blocks.1") == 1
    assert "returned by the model: not counted" in text
    assert all(len(line) < 220 for line in text.splitlines())


def test_json_is_the_whole_plan() -> None:
    found = _plan("plain")
    data = json.loads(found.to_json())
    assert data["activation_bytes"] == found.activation_bytes
    assert data["blocks"][1]["kept"][0]["name"] == found.blocks[1].kept[0].name
    assert data["options"]["recompute"] == "selective"
    # Those that a user can give, no flag that pipelines set.
    assert set(data["options"]) == {"tp", "ep", *Options.__annotations__}
    assert {field.name for field in dataclasses.fields(Plan)} <= {
        *data,
        "explainer",
        "formula_maker",
    }


def test_example_inputs_must_be_args_and_kwargs() -> None:
    with pytest.raises(ArgumentError, match=r"\(args, kwargs\)"):
        plan(zoo.build("plain"), zoo.inputs("plain"))  # type: ignore[call-overload]


def test_planning_changes_nothing() -> None:
    model = zoo.build("plain")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan(model, ((), zoo.inputs("plain")), tp=4)
    assert not dist.is_initialized()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_planning_beside_a_default_group_of_another_size() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert plan(zoo.build("plain"), ((), zoo.inputs("plain")), tp=4).tp == 4
        assert dist.group.WORLD is group
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_models_on_the_meta_device() -> None:
    config = GPTConfig(vocab_size=64, num_positions=8, hidden_size=16, num_layers=2, num_heads=2)
    ids = torch.zeros(2, 8, dtype=torch.long)
    with torch.device("meta"):
        model = PlainGPT(config)
    real = plan(PlainGPT(config), ((), {"input_ids": ids, "labels": ids}), tp=2)
    meta = plan(model, ((), {"input_ids": ids, "labels": ids}), tp=2)
    assert meta == real  # but for times


def test_peak_of_one_function() -> None:
    """Lives of overlapping ``y`` and ``z``: a dies with y, y with z, a result never."""
    mode = FakeTensorMode()
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.empty(10, dtype=torch.float32))

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = fake_value(target, args, {})
        return node

    a = call(aten.exp.default, x)  # 40 bytes live
    y = call(aten.cat.default, [a, a, a])  # 40 + 120, then a dies
    view = call(aten.view.default, y, [3, 10])  # no storage of its own
    z = call(aten.sum.dim_IntList, view, [0])  # 120 + 40, then y dies
    result = call(aten.sin.default, z)  # 40 + 40, then z dies
    graph.output((result,))
    assert function_peak_bytes(graph) == 160
    graph.output_node().args = ((result, y),)
    assert backward_peak_bytes(graph, {0}) == 160
    assert backward_peak_bytes(graph, {1}) == 80


def test_a_parameters_own_gradient_among_several_results() -> None:
    """Bytes of a norm's gradients: 10 x 10 of its input, 10 of its weight, 10 of its bias."""
    b = GraphBuilder()
    g, x, w = b.input("g", 10, 10), b.input("x", 10, 10), b.input("w", 10)
    mean, rstd = b.input("mean", 10, 1), b.input("rstd", 10, 1)
    args = (g, x, [10], mean, rstd, w, w, [True, True, True])
    norm = b.call(aten.native_layer_norm_backward.default, *args)
    graph = b.output(*(b.call(operator.getitem, norm, index) for index in range(3)))
    assert backward_peak_bytes(graph, ()) == 4 * (100 + 10 + 10)
    assert backward_peak_bytes(graph, {1}) == 4 * (100 + 10)
    assert backward_peak_bytes(graph, {1, 2}) == 4 * 100


def test_a_gradient_that_is_copied_into_its_parameters_is_temporary() -> None:
    """One that does not lie in memory as the parameter does; 10 x 20 numbers."""
    b = GraphBuilder()
    g, x = b.input("g", 30, 10), b.input("x", 30, 20)
    grad = b.call(aten.mm.default, b.call(aten.t.default, g), x)
    graph = b.output(grad, b.call(aten.t.default, grad))
    assert backward_peak_bytes(graph, {0}) == 0
    assert backward_peak_bytes(graph, {1}) == 4 * 10 * 20


def test_options_are_those_of_compile() -> None:
    program = compiled(case("plain", 2, 12), tp=2)
    found = make_plan(program, CompileOptions(tp=2), "GPT")
    assert found.model_name == "GPT"
    with pytest.raises(ArgumentError, match="recompute"):
        _plan("plain", recompute="some")
