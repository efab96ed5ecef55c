"""``torch.compile(model, backend="sp_compiler")``: against eager on one rank."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule

import sp_compiler
import sp_compiler.torch_compile.backend
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.placement import Placement, S
from sp_compiler.base.shards import local_part
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from sp_compiler.runtime.failures.board import FailureBoard
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.torch_compile.backend import sp_compiler_backend
from sp_compiler.torch_compile.dynamo_graph import DynamoGraph, dotted_path
from sp_compiler.torch_compile.full_parameters import gather_gradients
from tests.helpers.dynamo import (
    HIDDEN,
    compiled_by_dynamo,
    counting_net,
    loss_and_gradients,
    random_ids,
)
from tests.helpers.parity import gradient_error

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def _same_as_eager(compiled: Any, expected: nn.Module, model: nn.Module, ids: Tensor) -> None:
    loss, grads = loss_and_gradients(model, compiled, ids, ids)
    true_loss, true_grads = loss_and_gradients(expected, expected, ids, ids)
    assert loss == pytest.approx(true_loss, rel=1e-12)
    assert gradient_error(grads, true_grads) < 1e-12


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[CompiledProgram]:
    """Graphs that the backend compiled, in order."""
    made: list[CompiledProgram] = []
    original = sp_compiler.torch_compile.backend.build

    def record(*args: Any, **kwargs: Any) -> CompiledProgram:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sp_compiler.torch_compile.backend, "build", record)
    return made


def test_trains_like_eager_and_compiles_once(programs: list[CompiledProgram]) -> None:
    model, expected = counting_net(), counting_net()
    compiled, counter = compiled_by_dynamo(model), model.num_calls
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, expected)]
    for _ in range(4):
        _same_as_eager(compiled, expected, model, random_ids())
        for optimizer in optimizers:
            optimizer.step()
    assert len(programs) == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert model.num_calls == expected.num_calls == 4
    assert model.num_calls is counter
    calls = programs[0].program.calls
    assert [call.path for call in calls] == ["", "blocks.0", "blocks.1", ""]
    assert calls[1].region is calls[2].region
    assert calls[2].args[0].name == "blocks.1.norm.weight"


def test_each_shape_is_compiled_once(programs: list[CompiledProgram]) -> None:
    model, expected = counting_net(), counting_net()
    compiled = compiled_by_dynamo(model)
    for seq in (4, 6, 5, 6, 4, 5):
        _same_as_eager(compiled, expected, model, random_ids(seq=seq))
    # dynamo leaves the size open at the second one; programs are for one size each.
    assert counters["stats"]["unique_graphs"] == 2
    assert len(programs) == 4


def test_dynamic_shapes_and_numbers_are_fixed_per_call(programs: list[CompiledProgram]) -> None:
    model = counting_net()

    @torch.compile(backend=sp_compiler_backend, dynamic=True)
    def scaled(ids: Tensor, scale: float) -> Tensor:
        return scale * model(ids, ids)

    for seq, scale in ((4, 2.0), (5, 3.5), (4, 2.0), (5, 3.5)):
        ids = random_ids(seq=seq)
        torch.testing.assert_close(scaled(ids, scale), scale * model(ids, ids), rtol=1e-12, atol=0)
    assert len(programs) == 2
    assert counters["stats"]["unique_graphs"] == 1


def test_a_graph_that_writes_into_its_input_is_refused() -> None:
    @torch.compile(backend=sp_compiler_backend)
    def change(x: Tensor) -> Tensor:
        return x.add_(1)

    with pytest.raises(UnsupportedError, match="only buffers may be written"):
        change(torch.zeros(3))


@pytest.mark.slow
def test_modes(programs: list[CompiledProgram]) -> None:
    model, expected = counting_net(p=0.5), counting_net(p=0.5)
    compiled, ids = compiled_by_dynamo(model), random_ids()
    training_loss = compiled(ids, ids).item()
    model.eval()
    expected.eval()
    _same_as_eager(compiled, expected, model, ids)
    with torch.no_grad():
        no_grad = compiled(ids, ids)
    with torch.inference_mode():
        inference = compiled(ids, ids)
    loss = expected(ids, ids).item()
    assert not no_grad.requires_grad
    assert (no_grad.item(), inference.item()) == pytest.approx((loss, loss), rel=1e-12)
    assert training_loss != pytest.approx(loss, rel=1e-3)
    num_programs = len(programs)
    _same_as_eager(compiled, expected, model, ids)
    assert len(programs) == num_programs


def test_dropout_follows_the_seed() -> None:
    ids = random_ids()
    compiled = compiled_by_dynamo(counting_net(p=0.5))
    torch.manual_seed(7)
    first, second = compiled(ids, ids).item(), compiled(ids, ids).item()
    torch.manual_seed(7)
    again = compiled(ids, ids).item()
    assert first == again
    assert first != second


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_graph_breaks() -> None:
    model, expected = counting_net(breaks=True), counting_net(breaks=True)
    compiled = compiled_by_dynamo(model)
    for _ in range(3):
        _same_as_eager(compiled, expected, model, random_ids())
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_blocks_compiled_one_by_one_share_a_program(programs: list[CompiledProgram]) -> None:
    model, expected = counting_net(), counting_net()
    for block in model.blocks:
        block.compile(backend=sp_compiler_backend)
    _same_as_eager(model, expected, model, random_ids())
    assert len(programs) == 1


def test_a_checkpoint_around_the_first_call_sees_nothing_of_the_compilation() -> None:
    model = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    compiled = torch.compile(model, backend="sp_compiler", options={"tp": 1})
    x = torch.randn(2, HIDDEN, dtype=torch.float64)
    # It counts what autograd saves, in both of its forwards.
    torch.utils.checkpoint.checkpoint(lambda: compiled(x), use_reentrant=False).sum().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(
        model.weight.grad, x.sum(0).expand(HIDDEN, HIDDEN), rtol=0, atol=1e-14
    )


def test_checkpointing_in_the_model_is_ignored_with_a_warning() -> None:
    model, expected = counting_net(checkpointed=True), counting_net()
    compiled = compiled_by_dynamo(model)
    with pytest.warns(UserWarning, match="recompute="):
        compiled(random_ids(), random_ids())  # another graph than the next: one tensor passed twice
    warnings.simplefilter("ignore")
    _same_as_eager(compiled, expected, model, random_ids())


def test_frozen_parameters_and_gradients_of_inputs() -> None:
    model, expected = counting_net(), counting_net()
    for net in (model, expected):
        net.head.requires_grad_(False)
        net.blocks[0].up.requires_grad_(False)
    compiled = compiled_by_dynamo(model)
    _same_as_eager(compiled, expected, model, random_ids())
    assert model.head.weight.grad is None
    block = compiled_by_dynamo(copy.deepcopy(model.blocks[1]))
    x = torch.randn(2, 4, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    block(x).square().sum().backward()
    model.blocks[1](y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)


def test_autocast() -> None:
    model, expected = counting_net().float(), counting_net().float()
    compiled, ids = compiled_by_dynamo(model), random_ids()
    with torch.autocast("cpu", torch.bfloat16):
        loss, true = compiled(ids, ids), expected(ids, ids)
    full = compiled(ids, ids)
    loss.backward()
    true.backward()
    assert loss.dtype is true.dtype
    torch.testing.assert_close(loss, true, rtol=1e-3, atol=1e-3)
    assert abs((full - expected(ids, ids)).item()) < 1e-6 < abs((full - loss).item())
    for actual, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, theirs.grad, rtol=0.05, atol=5e-3)


def test_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    model = counting_net()
    loss = compiled_by_dynamo(model)(random_ids(), random_ids())
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_errors_of_a_backward_concern_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first call that records a graph on, as those of a compiled module."""
    board = FailureBoard.__new__(FailureBoard)
    board.trains, board.unfinished_step = False, None
    monkeypatch.setattr(TensorParallelGroup, "boards", lambda group, **_: (board,))
    compiled_by_dynamo(counting_net())(random_ids(), random_ids())
    assert board.trains


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_parallel": 2}, ArgumentError, r"'tensor_parallel'.*expected one of tp, .*, mesh"),
        ({"outputs": "shard"}, ArgumentError, "'replicate'"),
        ({"recompute": "some"}, ArgumentError, "'selective'"),
        ({"recompute": "auto"}, ArgumentError, "memory_budget"),
        ({"tp": 0}, ArgumentError, "positive int"),
        ({"rank_timeout": 0}, ArgumentError, "rank_timeout=0: expected a positive number"),
        ({"tp": 2}, ArgumentError, "init_process_group"),
        ({"recompue": "full"}, ArgumentError, "did you mean 'recompute'"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], message: str) -> None:
    compiled = compiled_by_dynamo(counting_net(), **options)
    for _ in range(2):  # not in another error of torch's, and each time
        with pytest.raises(error, match=message):
            compiled(random_ids(), random_ids())


def test_options_are_a_dict() -> None:
    options: Any = "tp=1"
    compiled: Any = torch.compile(counting_net(), backend="sp_compiler", options=options)
    with pytest.raises(ArgumentError, match="options='tp=1': expected a dict"):
        compiled(random_ids(), random_ids())


def test_modes_of_torch_compile_are_refused() -> None:
    compiled = torch.compile(counting_net(), backend=sp_compiler_backend, mode="reduce-overhead")
    with pytest.raises(ArgumentError, match="no modes"):
        compiled(random_ids(), random_ids())


def test_entry_point_names_the_backend() -> None:
    setup = Path(__file__).parents[2].joinpath("setup.py").read_text(encoding="utf-8")
    pattern = r'"torch_dynamo_backends": \[\s*"sp_compiler = ([\w.]+:\w+)"\s*\]'
    (target,) = re.findall(pattern, setup)
    assert target == f"{sp_compiler_backend.__module__}:{sp_compiler_backend.__name__}"


@pytest.mark.parametrize(
    ("expression", "root", "path"),
    [
        ("L['s']._modules['a']._modules['0']._parameters['weight']", "L['s']", "a.0.weight"),
        ("L['self'].bert.attention.self", "L['self']", "bert.attention.self"),
        ("L['self']", "L['self']", ""),
        ("G['model'].head", "", "model.head"),
        ("G['model'].head", "L['self']", "model.head"),
        ("L['blocks'][1]._buffers['scale']", "", "blocks.1.scale"),
    ],
)
def test_dotted_paths(expression: str, root: str, path: str) -> None:
    assert dotted_path(expression, root) == path


class _Scale(nn.Module):
    def __init__(this) -> None:
        super().__init__()
        this.up, this.weight = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(this, x: Tensor) -> Tensor:
        return this.up(x) * this.weight


_FIRST, _SECOND = _Scale(), _Scale()


@pytest.mark.parametrize(
    ("function", "names", "paths"),
    [
        (_FIRST, {"up.weight", "up.bias", "weight"}, {"up"}),
        # Dynamo traces a wrapper of torch's own modules.
        (nn.Sequential(nn.Linear(4, 4)), {"0.weight", "0.bias"}, {"", "0"}),
        (lambda x: _FIRST(x), {"up.weight", "up.bias", "weight"}, {"", "up"}),
        (
            lambda x: _FIRST(_SECOND.up(x)),
            {
                *("_FIRST.up.weight", "_FIRST.up.bias", "_FIRST.weight"),
                *("_SECOND.up.weight", "_SECOND.up.bias"),
            },
            {"_FIRST", "_FIRST.up", "_SECOND.up"},
        ),
    ],
)
def test_names_are_those_in_the_compiled_module(
    function: Any, names: set[str], paths: set[str]
) -> None:
    graphs: list[DynamoGraph] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        graphs.append(DynamoGraph.of(module, inputs))
        return module.forward

    torch.compile(function, backend=backend)(torch.ones(2, 4))
    (graph,) = graphs
    owned = zip(graph.names, graph.kinds, strict=True)
    assert {name for name, kind in owned if kind == "param"} == names
    stacks = [n.meta.get("nn_module_stack") or {} for n in graph.module.graph.nodes]
    assert {path for stack in stacks for path, _ in stack.values()} == paths


class _Ranks:
    """Stands for the communicator of rank 0 of two whose gradients are each other's negative."""

    world_size = 2

    def __init__(self) -> None:
        self.gathered: list[int] = []

    def all_gather(self, x: Tensor, src: str, dst: str) -> Tensor:
        assert (src, dst) == ("S(0)", "I")
        self.gathered.append(x.numel())
        return torch.cat([x, -x])


@pytest.mark.parametrize("placement", [S(0), S(1), S(0, (4, 8)), S(1, (5,))], ids=str)
def test_parts_of_parameters_keep_no_copy_of_all(placement: Placement) -> None:
    world_size, width = 2, 5 if placement.segments == (5,) else 6
    full = torch.arange(12.0 * width).view(12, width)
    for rank in range(world_size):
        part = Communicator(None, rank, world_size).part_of(full, placement)
        torch.testing.assert_close(part, local_part(full, placement, rank, world_size))
        storage = part.untyped_storage()
        is_view = storage.data_ptr() == full.untyped_storage().data_ptr()
        assert is_view or storage.nbytes() == part.nbytes
        assert is_view == (len(placement.segments) < 2 and not placement.padding(world_size))


def test_gradients_are_gathered_in_buckets() -> None:
    tp: Any = _Ranks()
    first = torch.arange(6.0).view(2, 3)
    second = torch.arange(4.0).view(4, 1)
    double = torch.ones(2, dtype=torch.float64)
    full = gather_gradients(
        tp, [first, None, second, double], [S(1), S(0), S(0, (4, 4)), S(0)], bucket_bytes=40
    )
    # Beside each other, numbers of two dtypes would all get the wider one.
    assert [grad.dtype for grad in full if grad is not None] == [first.dtype] * 2 + [double.dtype]
    mixed = gather_gradients(tp, [first[0], double], [S(0), S(0)], bucket_bytes=400)
    assert [grad.dtype for grad in mixed if grad is not None] == [first.dtype, double.dtype]
    assert tp.gathered[2:] == [3, 2]
    del tp.gathered[2:]
    assert full[1] is None
    torch.testing.assert_close(full[0], torch.cat([first, -first], 1))
    torch.testing.assert_close(
        full[2], torch.cat([second[:2], -second[:2], second[2:], -second[2:]])
    )
    torch.testing.assert_close(full[3], torch.cat([double, -double]))
    assert tp.gathered == [10, 2]
    gather_gradients(tp, [first, second], [S(1), S(0)], bucket_bytes=39)
    assert tp.gathered[2:] == [6, 4]
