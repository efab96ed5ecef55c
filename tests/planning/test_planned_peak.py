"""The peak of a plan is that of a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from benchmarks.measure import PeakRecorder
from benchmarks.memory_check import measure
from sp_compiler.api import plan
from sp_compiler.cost.step_memory import step_memory
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from sp_compiler.runtime.executor import Executor
from tests.helpers.fake_group import fake_group
from tests.helpers.parity import SEED, Case, case, compiled, make_case
from tests.helpers.torch_versions import FAKES_HALVE_LOG_SUM_EXP

aten = torch.ops.aten

_needs_whole_log_sum_exp = pytest.mark.xfail(
    FAKES_HALVE_LOG_SUM_EXP,
    reason="fakes of this torch give attention's log-sum-exp in float64 half its bytes",
    strict=True,
)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "name", ["plain_unfused", pytest.param("llama", marks=_needs_whole_log_sum_exp)]
)
def test_planned_peak_is_that_of_a_running_step(name: str, recompute: str) -> None:
    found = case(name, 2, 12)
    program = compiled(found, tp=1, recompute=recompute)
    planned = step_memory(program).peak_bytes
    assert _measured_peak(found, program) == planned
    accumulating = step_memory(program, accumulates=True).peak_bytes
    assert _measured_peak(found, program, accumulates=True) == accumulating > planned


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class _Again(nn.Module):
    """Two equal layers, one of which runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in (0, 1, 0):
            x = self.layers[index](x)
        return x.square().mean()


def test_planned_peak_where_some_calls_of_a_block_share_parameters() -> None:
    """A part of a gradient is temporary in the calls that share it, and in no other."""
    torch.manual_seed(0)
    found = make_case(_Again().double(), {"x": torch.randn(2, 3, 16, dtype=torch.float64)})
    program = compiled(found, tp=1)
    names = [call.region.name for call in program.program.calls]
    assert names.count("_Layer") == 3
    for accumulates in (False, True):
        planned = step_memory(program, accumulates=accumulates).peak_bytes
        assert _measured_peak(found, program, accumulates=accumulates) == planned


def test_the_sum_of_a_replicated_gradient_is_there_until_it_is_reduced() -> None:
    """And not also the parts of it, one of each call of the layer that runs twice."""
    torch.manual_seed(0)
    hints = {"layers.*.up": Replicate(), "layers.*.down": Replicate()}
    inputs = {"x": torch.randn(2, 4, 16, dtype=torch.float64)}
    found = make_case(_Again().double(), inputs, hints=hints)
    program = compiled(found, tp=2, hints=hints, overlap=False)
    memory = step_memory(program)
    with fake_group(2):
        assert measure(found, program) == (memory.kept_bytes, memory.peak_bytes)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_parts_of_a_sharded_gradient_are_added_to_the_first_which_is_no_activation(
    recompute: str,
) -> None:
    """It is in ``grad`` of its DTensor from the start, with plain tensors only at the end."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 4, 16, dtype=torch.float64)}
    program = compiled(found := make_case(_Again().double(), inputs), tp=2, recompute=recompute)
    assert program.param_placements["layers.0.up.weight"].is_sharded
    memory = step_memory(program)
    with fake_group(2):
        assert measure(found, program) == (memory.kept_bytes, memory.peak_bytes)
    assert step_memory(program, accumulates=True).peak_bytes > memory.peak_bytes + 16 * 64 * 8


@_needs_whole_log_sum_exp
def test_a_gather_receives_the_padding_of_all_ranks() -> None:
    """Key heads that eight ranks do not divide are gathered where the step has its peak."""
    program = compiled(found := case("llama_gqa8", 2, 16), tp=8, recompute="none")
    memory = step_memory(program)
    with fake_group(8):
        assert measure(found, program, rank=7) == (memory.kept_bytes, memory.peak_bytes)


class _Teacher(_Again):
    """Learns what its own layers return, which it runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        student = x
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        for layer in self.layers:
            student = layer(student)
        return (student - x).square().mean()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_planned_peak_of_layers_that_also_run_without_gradients(recompute: str) -> None:
    """They save nothing then, and all of a gradient comes from the other call."""
    torch.manual_seed(0)
    found = make_case(_Teacher().double(), {"x": torch.randn(2, 3, 16, dtype=torch.float64)})
    program = compiled(found, tp=1, recompute=recompute)
    memory = step_memory(program)
    taught = [index for index, call in enumerate(program.program.calls) if index < 2 and call.path]
    assert len(taught) == 2
    assert not {kept.call for kept in memory.kept}.intersection(taught)
    assert _measured_peak(found, program) == memory.peak_bytes
    accumulating = step_memory(program, accumulates=True).peak_bytes
    assert _measured_peak(found, program, accumulates=True) == accumulating


class _Momentum(nn.Module):
    """Multiplies by a buffer, which it then writes."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(2))
        self.register_buffer("table", torch.ones(16, 64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        scores = x @ self.table
        self.table.mul_(0.9)
        return scores.square().mean()


def test_a_buffer_that_forward_writes_is_kept_as_it_was() -> None:
    """In a copy, until backward has read it; its new value is gone when the call ends."""
    torch.manual_seed(0)
    found = make_case(_Momentum().double(), {"x": torch.randn(2, 3, 16, dtype=torch.float64)})
    program = compiled(found, tp=1, recompute="full")
    memory = step_memory(program)
    table_bytes = found.buffers["table"].nbytes
    assert [k.storage.num_bytes for k in memory.kept].count(table_bytes) == 1
    assert _measured_peak(found, program) == memory.peak_bytes


def test_the_peak_counts_the_bucket_of_replicated_gradients() -> None:
    """The gradients, what is sent of them together, and what arrives."""
    model, x = nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 16)), torch.randn(2, 3, 16)
    hints = {"0": Replicate(), "1": Replicate()}
    found = plan(model, ((x,), {}), tp=2, hints=hints)
    replicated = sum(parameter.nbytes for parameter in model.parameters())
    assert found.replicated_parameter_bytes == replicated
    assert 3 * replicated <= found.activation_peak_bytes < 3.5 * replicated
    alone = plan(model, ((x,), {}), tp=1)
    assert alone.activation_peak_bytes < 0.5 * replicated


def _measured_peak(found: Case, program: CompiledProgram, *, accumulates: bool = False) -> int:
    """Of a training step on one rank, without parameters and the gradients that it leaves."""
    params = {key: value.detach().requires_grad_() for key, value in found.params.items()}
    if accumulates:
        for value in params.values():
            value.grad = torch.zeros_like(value)
    with PeakRecorder() as recorder:
        # Not the new values of buffers, which the caller copies and drops.
        outputs = (
            Executor(program, Communicator(None, 0, 1))
            .run(params, found.buffers, found.inputs, SEED)
            .outputs
        )
        (loss,) = [x for x in outputs if isinstance(x, Tensor) and not x.dim()]
        loss.backward()
    grads = [value.grad for value in params.values() if value.grad is not None]
    inputs = [value for value in found.inputs if isinstance(value, Tensor)]
    outside = [*grads, *params.values(), *found.buffers.values(), *inputs]
    return recorder.peak_bytes(excluding=outside)


class _Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def test_the_peak_counts_copies_of_padded_parameters() -> None:
    """Of 127 columns on two ranks, beside the gradient that is copied without the padding."""
    x, hints = torch.randn(2, 8, 32), {"up": Shard(0), "down": Shard(1)}

    def peak_bytes(width: int) -> int:
        options: dict[str, Any] = {"hints": hints, "recompute": "none"}
        return plan(_Wide(width), ((x,), {}), tp=2, **options).activation_peak_bytes

    assert peak_bytes(127) == peak_bytes(128) + 2 * 4 * 32 * 64


class _OddLayer(nn.Module):
    """A layer of which rank 1 of two pads a third."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(16, 3 * 16), nn.Linear(3 * 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (3, 16)).transpose(1, 2)
        core = nn.functional.scaled_dot_product_attention(q, q, q)
        return x + self.out(core.transpose(1, 2).flatten(2))


def test_the_peak_counts_padded_parameters_of_the_layer_that_is_recomputed_ahead() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(_OddLayer() for _ in range(3)), nn.Linear(16, 1)).double()
    inputs = {"input": torch.randn(2, 8, 16, dtype=torch.float64)}
    found = make_case(model, inputs)
    program = compiled(found, tp=2, recompute="full")
    assert any(region.partitioned.ahead for region in program.regions.values())
    memory = step_memory(program)
    with fake_group(2):
        (_, peak) = measure(found, program, rank=1)
    assert abs(peak / memory.peak_bytes - 1) < 0.01


class _Skips(nn.Module):
    """Joins what layers pass on by columns, whose gradients have gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.joins = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        third = self.layers[2](self.joins[0](torch.cat([second, second.sin()], -1)))
        joined: Tensor = self.joins[1](torch.cat([third, first], -1))
        return joined.square().mean()


def test_the_peak_counts_copies_of_gradients_with_gaps() -> None:
    """A layer's backward reads its own contiguous copy; the other half waits as it is."""
    torch.manual_seed(0)
    found = make_case(_Skips().double(), {"x": torch.randn(2, 3, 16, dtype=torch.float64)})
    program = compiled(found, tp=1, recompute="full")
    assert _measured_peak(found, program) == step_memory(program).peak_bytes
