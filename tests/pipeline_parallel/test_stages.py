"""Cut of a program: stages, what they send, microbatches, schedules, refusals; no ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules as torch_schedules

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from sp_compiler.options import CompileOptions
from sp_compiler.pipeline_parallel.cutting import check_layers
from sp_compiler.pipeline_parallel.schedules import SCHEDULES, schedule_of
from sp_compiler.pipeline_parallel.stage_parameters import StageParameters
from sp_compiler.pipeline_parallel.stage_program import chain_of, loss_of, stages_of
from sp_compiler.pipeline_parallel.ties import holders_of
from sp_compiler.runtime.executor import Executor
from sp_compiler.trace.export import flatten_inputs
from tests.helpers.fake_group import fake_group
from tests.helpers.handmade_module import compiled_handmade
from tests.helpers.slow import slow
from tests.helpers.torch_versions import NEEDS_V_SCHEDULES
from tests.helpers.users import assert_same_gradients, batch, net
from tests.models import zoo

SEED = torch.tensor(5)
# As a step of a pipeline is compiled.
STAGED = CompileOptions(loss_only=True, tables_apart=True)


def _compiled(name: str, **fields: Any) -> tuple[nn.Module, CompiledProgram]:
    model = zoo.build(name, **fields)
    return model, build(model, (), zoo.inputs(name), STAGED)


@pytest.mark.parametrize(
    ("name", "ends", "sent"),
    [
        ("gpt2", [2, 3, 4], [1, 1, 0]),
        slow("llama", [1, 2, 4], [1, 1, 0]),
        slow("t5", [2, 5, 7], [3, 2, 0]),
    ],
)
def test_stages_one_after_the_other_are_the_model(
    name: str, ends: list[int], sent: list[int]
) -> None:
    """Masks and rotary tables are made again; encoder states go through the stages between."""
    model, compiled = _compiled(name, dropout=0.1)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    leaves, _ = flatten_inputs((), zoo.inputs(name))
    tp = Communicator(None, 0, 1)
    loss = loss_of(compiled.program)
    chain = chain_of(compiled.program, loss)
    stages = stages_of(compiled, loss, chain, [*ends[:-1], len(chain)])
    assert [len(stage.sent) for stage in stages] == sent
    received: list[Any] = []
    for stage in stages:
        assert [tuple(v.shape) for v in received] == [tuple(v.shape) for v in stage.received_like]
        own = {name: params[name] for name in stage.parameters}
        tables = {name: buffers[name] for name in stage.buffers}
        run = Executor(stage.compiled, tp).run(
            own, tables, [*leaves[: stage.num_inputs], *received], SEED
        )
        received = run.outputs
    full = Executor(compiled, tp).run(params, buffers, leaves, SEED)
    number = compiled.program.outputs.index(loss)
    assert torch.equal(received[0], full.outputs[number])
    used = frozenset().union(*(stage.parameters for stage in stages))
    assert used == {compiled.param_name(n) for n in used} <= set(params)


def test_masks_draw_as_without_pipeline() -> None:
    """The number of a call, from which dropout's seed is made, does not count the tables."""
    model = zoo.build("gpt2", dropout=0.1)
    seeds = []
    for tables_apart in (False, True):
        options = CompileOptions(tables_apart=tables_apart)
        program = build(model, (), zoo.inputs("gpt2"), options).program
        refs = [ref for call in program.calls for ref in call.args if ref.kind == "seed"]
        seeds.append([ref.index for ref in refs])
    assert seeds[0] == seeds[1] == [0, 1, 2]


class _Normalized(nn.Module):
    """Blocks with batch norms, and one in front of the loss."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": self.last(x).pow(3).mean()}


class _Remembering(_Normalized):
    """The first layers read what the last ones wrote in the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        result = super().forward(x / self.largest)
        self.largest.copy_(result["loss"].detach().abs())
        return result


def _stages(model: nn.Module, x: torch.Tensor, end: int) -> tuple[CompiledProgram, list[Any]]:
    compiled = build(model, (x,), {}, STAGED)
    loss = loss_of(compiled.program)
    chain = chain_of(compiled.program, loss)
    return compiled, stages_of(compiled, loss, chain, [end, len(chain)])


@pytest.mark.parametrize("end", [1, 2])
def test_a_stage_writes_the_buffers_of_its_layers(end: int) -> None:
    """Running statistics, and counts of batches, one of them a table: no input is in it."""
    model = _Normalized().double()
    x = torch.randn(6, 8, dtype=torch.float64)
    compiled, stages = _stages(model, x, end)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tp = Communicator(None, 0, 1)
    written: dict[str, torch.Tensor] = {}
    received: list[Any] = []
    for stage in stages:
        run = Executor(stage.compiled, tp).run(params, buffers, [x, *received], SEED)
        assert not written.keys() & run.mutated_buffers.keys()
        written |= run.mutated_buffers
        received = run.outputs
    full = Executor(compiled, tp).run(params, buffers, [x], SEED)
    assert written.keys() == full.mutated_buffers.keys() == buffers.keys()
    assert all(torch.equal(written[name], value) for name, value in full.mutated_buffers.items())
    assert torch.equal(received[0], full.outputs[0])


def test_a_buffer_that_is_written_belongs_to_one_stage() -> None:
    x = torch.randn(6, 8)
    with pytest.raises(UnsupportedError, match=r"'largest' is written by stage 1 .* by stage 0"):
        _stages(_Remembering(), x, 1)


def test_a_model_without_loss() -> None:
    _, compiled = _compiled("gpt2_logits")
    with pytest.raises(ArgumentError, match=r"returns no loss: .* pass labels"):
        loss_of(compiled.program)


@pytest.mark.parametrize(
    ("keys", "chosen"), [(("part", "loss"), "loss"), (("loss", "part"), "loss"), (("a", "b"), "a")]
)
def test_the_loss_is_the_output_of_that_name_or_else_the_first(
    keys: tuple[str, str], chosen: str
) -> None:
    """A part of the loss may be returned before the sum, with a gradient of its own."""

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            mean = super().forward(x).pow(2).mean()
            return dict(zip(keys, (mean, 3 * mean), strict=True))

    model, x = Model(4, 4), torch.randn(6, 4)
    expected = model(x)[chosen]
    for options in (STAGED, CompileOptions(tables_apart=True)):
        compiled = build(model, (x,), {}, options)
        position = compiled.program.outputs.index(loss_of(compiled.program))
        run = Executor(compiled, Communicator(None, 0, 1)).run(
            dict(model.named_parameters()), {}, [x], SEED
        )
        torch.testing.assert_close(run.outputs[position], expected)


class _Repeated(nn.Module):
    """One layer, used as often as there are numbers in ``times``; counts its own calls."""

    def __init__(self, uses: int, *, reads: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))])
        self.uses, self.reads, self.num_calls = uses, reads, 0
        # One of the model's own, which a forward for the count alone must not run.
        self.blocks[0].register_forward_hook(lambda *_: pytest.fail("a hook ran"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.reads and x.sum() > 0:
            return x
        for _ in range(self.uses):
            x = self.blocks[0](x)
        return x.sum()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_are_counted_before_the_capture(device: str) -> None:
    """By use, and the layers inside of layers with them."""
    model, x = _Repeated(2).to(device), torch.randn(2, 4)
    for stages in (1, 2):
        check_layers(model, (x,), {}, stages)
    with pytest.raises(ArgumentError, match="2 layers, too few for 3 pipeline stages"):
        check_layers(model, (), {"x": x}, 3)
    assert model.num_calls == 0
    assert len(model.blocks[0]._forward_hooks) == 1
    assert not model.blocks[0]._forward_pre_hooks
    # Nothing is known of what reads numbers, and one stage has no cut.
    check_layers(_Repeated(2, reads=True).to(device), (x,), {}, 3)
    check_layers(nn.Linear(4, 4), (x,), {}, 1)


class _Shared(nn.Module):
    """One block in all places of a list, and a weight that is tied besides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)] * 3)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.blocks[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        total: torch.Tensor = self.head(x).sum()
        return total


def test_counting_layers_leaves_a_block_of_several_names_as_it_was() -> None:
    model = _Shared()
    before = dict(model.named_parameters(remove_duplicate=False))
    check_layers(model, (torch.randn(2, 4),), {}, 3)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is value for name, value in before.items())
    with pytest.raises(ArgumentError, match="3 layers, too few for 4 pipeline stages"):
        check_layers(model, (torch.randn(2, 4),), {}, 4)


def test_blocks_whose_first_name_is_another_are_no_layers() -> None:
    model = _Shared()
    blocks = model.blocks
    del model.blocks
    model.block, model.blocks = blocks[0], blocks
    with pytest.raises(ArgumentError, match=r"0 layers.* give such a module no other name"):
        check_layers(model, (torch.randn(2, 4),), {}, 2)


def test_too_many_stages_are_refused_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_compiler.compiler.capture", lambda *_, **__: pytest.fail("captured"))
    model, inputs = zoo.build("plain", layers=2), ((), zoo.inputs("plain"))
    with pytest.raises(ArgumentError, match="2 layers, too few for 6 pipeline stages"):
        sp_compiler.plan(
            model, inputs, mesh="1x3", microbatches=3, schedule="interleaved", stages_per_rank=2
        )


@pytest.mark.parametrize(
    ("name", "per_rank", "first", "last"),
    [("1f1b", 1, 4, 1), ("gpipe", 1, 8, 8), ("interleaved", 1, 7, 1), ("zero_bubble", 1, 4, 4)],
)
def test_in_flight(name: str, per_rank: int, first: int, last: int) -> None:
    """Of 8 microbatches on 4 ranks: with 1F1B as many as there are stages from here on."""
    found = SCHEDULES[name].in_flight(4, per_rank, 8)
    assert (found[0], found[-1]) == (first, last)


@pytest.mark.parametrize("microbatches", [4, 12])
@pytest.mark.parametrize(("name", "per_rank"), [("interleaved", 3), ("zero_bubble", 2)])
def test_orders_are_those_that_torch_runs(name: str, per_rank: int, microbatches: int) -> None:
    schedule, ranks = SCHEDULES[name], 4
    orders = schedule.orders(ranks, per_rank, microbatches)
    for rank in range(ranks):
        stubs: list[Any] = [
            SimpleNamespace(
                num_stages=ranks * per_rank, group_size=ranks, group_rank=rank, stage_index=stage,
                submod=None, stage_index_to_group_rank=None,
            )
            for stage in range(rank, ranks * per_rank, ranks)
        ]  # fmt: skip
        torchs = getattr(torch_schedules, schedule.class_name)(stubs, microbatches)
        # With sends and gathers, which the orders leave out.
        runs = [each for each in torchs.pipeline_order_with_comms[rank] if each.is_compute_op]
        expected = [
            (each.computation_type, each.stage_index, each.microbatch_index) for each in runs
        ]
        assert [tuple(action) for action in orders[rank]] == expected


def test_in_flight_of_a_v() -> None:
    found = SCHEDULES["dualpipev"].in_flight(2, 2, 8)
    assert len(found) == 4
    assert max(found) <= 5


def test_a_v_goes_down_and_up() -> None:
    ranks = [SCHEDULES["dualpipev"].rank_of(stage, 2) for stage in range(4)]
    assert ranks == [0, 1, 1, 0]
    assert [SCHEDULES["interleaved"].rank_of(stage, 2) for stage in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pipe", None, 2, 4), "schedule='pipe': did you mean 'gpipe'. expected one of '1f1b'"),
        (("1f1b", None, 4, 3), "microbatches=3: .* at least 4"),
        pytest.param(
            ("dualpipev", None, 2, 3), "microbatches=3: .* at least 4", marks=NEEDS_V_SCHEDULES
        ),
        (("1f1b", 2, 2, 4), "stages_per_rank=2: schedule='1f1b' has 1"),
        (("interleaved", None, 2, 5), "takes them in 2 rounds"),
        (("gpipe", None, 2, 0), "microbatches=0: expected a positive int"),
    ],
)
def test_schedules_that_cannot_be(arguments: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        schedule_of(*arguments)


def test_ties_are_found() -> None:
    holders = holders_of([frozenset("ab"), frozenset("c"), frozenset("a")], [0, 1, 2])
    assert holders == {"a": {0, 2}, "b": {0}, "c": {1}}


def test_a_pipeline_of_one_rank() -> None:
    """Its one stage gets the inputs and has the loss."""
    model, x = net(), batch()
    with fake_group(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        pipeline = sp_compiler.pipeline(net(), mesh=mesh, example_inputs=((x,), {}), microbatches=2)
        loss = pipeline.step(x)
    expected = model(x)["loss"]
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_gradients(pipeline.module, model)
    with pytest.raises(UnsupportedError, match=r"pipeline\.step"):
        pipeline.module(x)


@pytest.mark.parametrize("weight", [torch.ones(3), None])
def test_weights_that_are_no_number(weight: Any) -> None:
    with fake_group(1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
        pipeline = sp_compiler.pipeline(
            net(),
            mesh=mesh,
            example_inputs=((batch(),), {}),
            microbatches=2,
            weigh=lambda _: weight,
        )
        with pytest.raises(ArgumentError, match=r"weigh= returned .* expected one number"):
            pipeline.step(batch())


def test_no_mesh() -> None:
    mesh: Any = None
    with pytest.raises(ArgumentError, match=r"a pipeline needs a DeviceMesh .* torchrun"):
        sp_compiler.pipeline(
            zoo.build("plain"),
            mesh=mesh,
            example_inputs=((), zoo.inputs("plain")),
            microbatches=2,
        )


def test_stages_cannot_share_the_memory_of_a_parameter() -> None:
    module, _ = compiled_handmade(1)
    name, parameter = next(iter(module.named_parameters()))
    module.register_buffer("view", parameter.detach()[:1])
    axis: Any = SimpleNamespace(size=2)
    with pytest.raises(ArgumentError, match=f"parameter '{name}' and buffer 'view'.*share memory"):
        StageParameters(module, axis)
