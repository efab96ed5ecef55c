"""What must not go unnoticed between a recorded step and its replay, or its backward."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sp_compiler
from sp_compiler.runtime.cuda_graphs import device_graph
from sp_compiler.runtime.failures import boards
from sp_compiler.runtime.rank_checks import RankAgreement
from tests.helpers.recorded_graph import Pool, record_on_cpu


class Net(nn.Module):
    """A buffer, and outputs that are an input, a parameter, a buffer and a constant."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.first(x)) * self.scale
        loss = self.last(hidden).square().mean()
        return loss, x, self.last.weight, self.scale, hidden.detach()


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    return record_on_cpu(monkeypatch)


def _compiled(*, cuda_graphs: bool = True) -> Any:
    torch.manual_seed(0)
    return sp_compiler.compile(Net().double(), tp=1, cuda_graphs=cuda_graphs)


def _x(seed: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, 4, dtype=torch.float64, generator=generator)


def _train(module: Any, batches: Iterable[Tensor]) -> None:
    for x in batches:
        module(x)[0].backward()


def _recorded(steps: int = 3) -> Any:
    """A module with frozen parameters whose third step was recorded."""
    module = _compiled()
    module.first.requires_grad_(False)
    _train(module, map(_x, range(steps)))
    module.zero_grad()
    return module


@pytest.mark.parametrize("name", ["last.weight", "first.weight", "scale"])
def test_a_change_before_the_backward_raises(name: str, pools: list[Pool]) -> None:
    """It reads trained and frozen parameters and buffers where they are."""
    module = _recorded()
    loss = module(_x(3))[0]
    with torch.no_grad():
        module.state_dict(keep_vars=True)[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert pools[0].replays == 3


def test_memory_that_the_ranks_share_lives_as_long_as_the_step(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch lets go of it when a later call needs more; replays would write where nothing is."""
    held = {"ranks": torch.ones(4)}
    monkeypatch.setattr(symmetric_memory, "_group_name_to_workspace_tensor", held)
    module, smaller = _recorded(), weakref.ref(held["ranks"])
    held["ranks"] = torch.ones(8)
    assert smaller() is not None
    del module
    gc.collect()
    assert smaller() is None


def test_an_error_in_the_backward_of_a_replay_is_a_failure(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may wait in its graph: they must hear of it, as of an error in any backward."""
    errors: list[BaseException] = []
    board = SimpleNamespace(trains=True, report=errors.append)
    monkeypatch.setattr(boards, "_BOARDS", {"group": board})
    run_backward = boards._reported(torch.autograd.graph._engine_run_backward)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward)
    module = _recorded()
    loss = module(_x(3))[0]
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert [type(error) for error in errors] == [ZeroDivisionError]
    own = _x(3).requires_grad_()
    own.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        own.sum().backward()
    assert len(errors) == 1


def test_gradients_that_are_put_off_in_between_are_refused(pools: list[Pool]) -> None:
    """The recorded backward would neither put its own off nor add those that wait."""
    module = _recorded()
    loss = module(_x(3))[0]
    with module.no_sync():  # on one rank nothing is put off
        loss.backward()
    loss = module(_x(4))[0]
    module._sp_state.deferred.pending["last.weight"] = torch.ones(4, 4)  # as with another rank
    with pytest.raises(sp_compiler.UnsupportedError, match=r"no_sync\(\) between a call"):
        loss.backward()


def test_a_parameter_with_other_strides_is_recorded_anew(pools: list[Pool]) -> None:
    losses = []
    for cuda_graphs in (False, True):
        module = _compiled(cuda_graphs=cuda_graphs)
        module.first.requires_grad_(False)
        for seed in range(5):
            if seed == 4:
                weight = module.get_parameter("first.weight")
                weight.data = weight.data.t()
            loss = module(_x(seed))[0]
            loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert [pool.replays for pool in pools] == [4, 2]


def test_parameters_that_move_all_the_time_are_not_recorded_anew(pools: list[Pool]) -> None:
    module = _recorded()
    weight = module.get_parameter("last.weight")

    def moved() -> Iterator[Tensor]:
        for seed in range(12):
            weight.data = weight.data.clone()
            yield _x(seed)

    with pytest.warns(UserWarning, match="no more steps are recorded in CUDA graphs"):
        _train(module, moved())
    assert len(pools) == 8


def test_outputs_are_those_of_a_step_as_it_is(pools: list[Pool]) -> None:
    """Values, and which of them require a gradient: while it warms up and when it is replayed."""
    steps: list[list[Any]] = []
    for cuda_graphs in (False, True):
        module = _compiled(cuda_graphs=cuda_graphs)
        steps.append([])
        for seed in range(4):
            x = _x(seed).requires_grad_()
            outputs = module(x)
            (outputs[0] + outputs[1].sum() + (2 * outputs[2]).sum()).backward()
            gradients = [x.grad, *[value.grad.clone() for value in module.parameters()]]
            steps[-1].append((outputs, gradients))
    for (plain, expected), (recorded, gradients) in zip(*steps, strict=True):
        assert all(map(torch.equal, recorded, plain))
        assert [value.requires_grad for value in recorded] == [True, True, True, False, False]
        assert all(map(torch.equal, gradients, expected))
    assert [pool.replays for pool in pools] == [4]


@pytest.mark.filterwarnings("error")
def test_calls_that_do_not_train_are_no_obstacle(pools: list[Pool]) -> None:
    """What they are called under says nothing of a step."""
    module = _recorded()
    with torch.no_grad(), torch.autograd.graph.save_on_cpu():
        module(_x(3))


def test_what_another_rank_cannot_record_is_not_replayed(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL lets a collective of a graph meet its like alone."""
    monkeypatch.setattr(RankAgreement, "exchanged", lambda *_: ["", "no memory left"])
    module = _recorded(2)
    with pytest.warns(UserWarning, match="could not be recorded: no memory left"):
        _train(module, [_x(3)])
    _train(module, [_x(4)])
    assert [pool.replays for pool in pools] == [0]


def test_too_many_sizes_are_told(pools: list[Pool]) -> None:
    module = _compiled()
    with pytest.warns(UserWarning, match="more than 8 kinds of steps"):
        _train(module, (_x(0, rows) for rows in range(2, 11)))
    assert not pools


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fully_shard_is_an_obstacle(pools: list[Pool], one_rank: None) -> None:
    """Also on the whole module, whose own hooks run outside of what is recorded."""
    module = _compiled()
    module(_x(0))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    with pytest.warns(UserWarning, match="because fully_shard gathers parameters"):
        _train(module, map(_x, range(4)))
    assert not pools


def test_a_failed_recording_leaves_the_stream_and_other_threads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's context leaves its stream current if it cannot end a recording, and the default
    generator of the device in the state of a recording."""
    device = torch.device("cuda", 1)
    current, given = ["user's"], {}
    states = ["other device's", "recording"]
    generator = SimpleNamespace(
        clone_state=lambda: f"copy of {states[1]}",
        graphsafe_set_state=lambda state: states.__setitem__(1, state),
    )

    @contextlib.contextmanager
    def stream(value: str) -> Iterator[None]:
        before, current[0] = current[0], value
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def graph(graph: Any, **arguments: Any) -> Iterator[None]:
        given.update(arguments)
        current[0] = arguments["stream"]
        yield
        current[0] = "user's"

    cuda = SimpleNamespace(
        CUDAGraph=object,
        Stream=lambda device: f"of {device}",
        current_stream=lambda device: current[0],
        stream=stream,
        graph=graph,
        default_generators=[None, generator],
    )
    monkeypatch.setattr(torch, "cuda", cuda)

    def fail() -> None:
        assert current == ["of cuda:1"]
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        device_graph.DeviceGraph(device, "pool").record(fail)
    assert current == ["user's"]
    assert states == ["other device's", "copy of recording"]
    assert given == {"pool": "pool", "stream": "of cuda:1", "capture_error_mode": "thread_local"}
