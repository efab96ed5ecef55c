"""Steps that are recorded and replayed, by a stand-in for CUDA graphs, beside steps as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sp_compiler
from sp_compiler import ArgumentError, UnsupportedError
from sp_compiler.runtime.executor import Executor
from tests.helpers.ranks import run_on_ranks
from tests.helpers.recorded_graph import Pool, record_on_cpu
from tests.helpers.shared_programs import shared_programs
from tests.helpers.slow import slow
from tests.helpers.two_ranks import full
from tests.models import zoo

Step = Callable[[Any, int], Tensor]


class Net(nn.Module):
    """Dropout, a tied weight, a parameter that some outputs do not use, a counter as an output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 8)
        self.inner = nn.Linear(8, 16)
        self.outer = nn.Linear(16, 8)
        self.side = nn.Linear(8, 3)

    def forward(self, ids: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
        x = self.table(ids)
        if bias is not None:
            x = x + bias
        x = x + F.dropout(self.outer(torch.tanh(self.inner(x))), 0.3, self.training)
        logits = F.linear(x, self.table.weight)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss, self.side(x).square().mean(), logits.argmax(-1), ids.shape[1]


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _ids(step: int, length: int = 6) -> Tensor:
    return torch.randint(24, (2, length), generator=torch.Generator().manual_seed(step))


def _first(module: Any, step: int) -> Tensor:
    loss: Tensor = module(_ids(step))[0]
    return loss


def _trained(
    model: nn.Module, step: Step, *, cuda_graphs: bool, steps: int = 6, tp: int = 1
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of some steps of SGD with momentum."""
    module: Any = sp_compiler.compile(model, tp=tp, cuda_graphs=cuda_graphs)
    torch.manual_seed(7)  # of the dropout
    optimizer: torch.optim.SGD | None = None
    losses = []
    for index in range(steps):
        loss = step(module, index)
        # After the first call, which places the parameters.
        optimizer = optimizer or torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full(value) for name, value in module.named_parameters()}


def _assert_same(step: Step, build: Callable[[], nn.Module] = _net, steps: int = 6) -> None:
    """A recorded run and one as it is end with the same bits."""
    plain, recorded = (_trained(build(), step, cuda_graphs=on, steps=steps) for on in (False, True))
    assert recorded[0] == plain[0]
    for name, value in plain[1].items():
        assert torch.equal(recorded[1][name], value), name


@pytest.fixture(autouse=True)
def _programs() -> Iterator[None]:
    with shared_programs():
        yield


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Pool]:
    return record_on_cpu(monkeypatch)


def _replays(pools: Sequence[Pool]) -> list[int]:
    return [pool.replays for pool in pools]


@pytest.mark.filterwarnings("error")
def test_steps_have_the_same_bits_and_run_no_code(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    run = Executor.run

    def counted(self: Executor, *args: Any) -> Any:
        runs.append(1)
        return run(self, *args)

    monkeypatch.setattr(Executor, "run", counted)
    _assert_same(_first)
    assert _replays(pools) == [8], "forward and backward of four steps"
    assert len(runs) == 6 + 2 + 1, "as it is, to warm up, and to record"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_whole_model(pools: list[Pool]) -> None:
    def step(module: Any, index: int) -> Tensor:
        return zoo.loss_of(module(**zoo.inputs("gpt2", seed=index)))

    _assert_same(step, lambda: zoo.build("gpt2", layers=1, dropout=0.1), steps=4)
    assert _replays(pools) == [4]


def test_accumulated_gradients_are_not_overwritten(pools: list[Pool]) -> None:
    def step(module: Any, index: int) -> Tensor:
        for part in (1, 2):
            _first(module, 3 * index + part).backward()
        return _first(module, 3 * index)

    _assert_same(step, steps=3)
    assert _replays(pools) == [14]


def test_outputs_stay_what_they_were(pools: list[Pool]) -> None:
    module = sp_compiler.compile(_net(), tp=1, cuda_graphs=True)
    outputs = []
    for index in range(5):
        loss, _, best, length = module(_ids(index))
        loss.backward()
        outputs.append((loss, best, loss.item(), best.clone(), length))
    assert _replays(pools) == [6]
    for loss, best, number, values, length in outputs:
        assert loss.item() == number
        assert torch.equal(best, values)
        assert not best.requires_grad
        assert length == 6
    assert len({number for _, _, number, _, _ in outputs}) == 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_size_is_recorded(pools: list[Pool]) -> None:
    _assert_same(lambda module, index: module(_ids(index, 5 + index % 2))[0], steps=10)
    assert _replays(pools) == [6, 6]


@pytest.mark.parametrize("retain", [slow(False), True])
def test_calls_before_the_backward_of_another(retain: bool, pools: list[Pool]) -> None:
    """The second must not overwrite what the first one's backward reads."""

    def step(module: Any, index: int) -> Tensor:
        losses = [_first(module, 2 * index + part) for part in range(2)]
        if not retain:
            return losses[0] + losses[1]
        losses[1].backward(retain_graph=True)
        return losses[0]

    with pytest.warns(UserWarning, match="the backward of the call before it may still run"):
        _assert_same(step, steps=4)
    assert sum(_replays(pools)) > 0


def test_a_call_without_a_backward_blocks_none(pools: list[Pool]) -> None:
    def step(module: Any, index: int) -> Tensor:
        _first(module, 100 + index)  # dropped at once
        with torch.no_grad():
            module(_ids(200 + index))
        return _first(module, index)

    _assert_same(step)
    assert _replays(pools) == [12]


@pytest.mark.slow
def test_backward_from_other_outputs(pools: list[Pool]) -> None:
    """From the second output alone, which does not reach all parameters, and from both."""

    def step(module: Any, index: int) -> Tensor:
        loss, side, *_ = module(_ids(index))
        return (loss, loss, loss, side, loss + 2 * side, loss)[index]

    _assert_same(step)
    assert _replays(pools) == [6], "four forwards, two backwards"
    module = sp_compiler.compile(_net(), tp=1, cuda_graphs=True)
    for index in range(4):
        loss, side, *_ = module(_ids(index))
        (loss if index < 3 else side).backward()
        grads = {name for name, value in module.named_parameters() if value.grad is not None}
        module.zero_grad()
    # No gradient, as without graphs, where what it starts from does not depend on a parameter.
    assert grads == {name for name, _ in module.named_parameters()}


def test_gradients_of_inputs(pools: list[Pool]) -> None:
    def step(module: Any, index: int) -> Tensor:
        bias = torch.full((8,), 0.1 * index, dtype=torch.float64, requires_grad=True)
        module(_ids(index), bias)[0].backward()
        assert bias.grad is not None
        grads.append(bias.grad)
        return _first(module, index)

    grads: list[Tensor] = []
    _assert_same(step, steps=5)
    assert len(pools) == 2
    for plain, recorded in zip(grads[:5], grads[5:], strict=True):
        assert torch.equal(plain, recorded)


def test_second_backwards(pools: list[Pool]) -> None:
    module = sp_compiler.compile(_net(), tp=1, cuda_graphs=True)
    for index in range(3):
        _first(module, index).backward()
    module.zero_grad()
    loss, side, *_ = module(_ids(3))
    loss.backward(retain_graph=True)
    once = {
        name: full(value.grad) for name, value in module.named_parameters() if "side" not in name
    }
    loss.backward(retain_graph=True)
    for name, value in once.items():
        assert torch.equal(full(module.get_parameter(name).grad), 2 * value), name
    side.backward(retain_graph=True)
    assert module.get_parameter("side.weight").grad is not None
    _first(module, 4)
    with pytest.raises(UnsupportedError, match="second time through a call of a module"):
        loss.backward()


def test_changed_parameters(pools: list[Pool]) -> None:
    module = sp_compiler.compile(_net(), tp=1, cuda_graphs=True)
    for index in range(3):
        _first(module, index).backward()
    loss = _first(module, 3)
    with torch.no_grad():
        module.get_parameter("inner.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # Another storage: recorded anew, not read from where the parameter was.
    parameter = module.get_parameter("inner.weight")
    parameter.data = torch.zeros_like(parameter)
    module.eval()
    plain = sp_compiler.compile(_net(), tp=1)
    plain.load_state_dict(module.state_dict())
    plain.eval()
    for index in range(4):
        assert _first(module, index).item() == _first(plain, index).item()
        _first(module, index).backward()
    parameter.data = torch.ones_like(parameter)
    plain.load_state_dict(module.state_dict())
    assert _first(module, 9).item() == _first(plain, 9).item()
    assert len(pools) == 3


@pytest.mark.slow
def test_frozen_parameters_are_another_step(pools: list[Pool]) -> None:
    def step(module: Any, index: int) -> Tensor:
        module.get_parameter("inner.weight").requires_grad_(index % 2 == 0)
        return _first(module, index)

    _assert_same(step, steps=8)
    assert _replays(pools) == [4, 4]


def _linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(24, 8), nn.Linear(8, 8), nn.Linear(8, 8)).double()


def _normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).double()


@pytest.mark.slow
def test_what_cannot_be_recorded_runs_as_it_is(pools: list[Pool]) -> None:
    def hooked(module: Any, index: int) -> Tensor:
        if not index:
            module(_ids(0))
            blocks = sorted(module._sp_state.layout.blocks)
            module.get_submodule(blocks[0]).register_forward_hook(lambda *_: seen.append(1))
        return zoo.loss_of(module(_ids(index)))

    seen: list[int] = []
    with pytest.warns(UserWarning, match="the host runs hooks between the kernels"):
        _assert_same(hooked, _linears, steps=4)
    assert len(seen) == 8
    with pytest.warns(UserWarning, match="the model changes its buffers: 1.running_mean"):
        _assert_same(
            lambda module, index: module(torch.full((4, 3), 1.0 + index).double()).square().mean(),
            _normed,
            steps=4,
        )
    assert not pools


def test_a_step_that_fails_to_be_recorded(
    pools: list[Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr("tests.helpers.recorded_graph.RecordedGraph.record", fail)
    with pytest.warns(UserWarning, match="could not be recorded: no memory left"):
        _assert_same(_first)
    assert len(pools) == 1, "tried once"


def test_refused_by_name() -> None:
    module = sp_compiler.compile(_net(), tp=1, cuda_graphs=True)
    with pytest.raises(ArgumentError, match="cuda_graphs=True: the module is on cpu"):
        module(_ids(0))
    with pytest.raises(ArgumentError, match="cuda_graphs=1: expected one of True, False"):
        sp_compiler.compile(_net(), tp=1, cuda_graphs=1)  # type: ignore[arg-type]
    budget: Any = {"recompute": "auto", "memory_budget": "1GiB", "offload": True}
    with pytest.raises(ArgumentError, match="cuda_graphs=True with offload=True"):
        sp_compiler.compile(_net(), tp=1, cuda_graphs=True, **budget)
    with pytest.raises(ArgumentError, match=r"cuda_graphs=True: torch\.compile"):
        torch.compile(_net(), backend="sp_compiler", options={"cuda_graphs": True})(_ids(0))


def _accumulated(module: Any, index: int) -> Tensor:
    """Every third step puts off the gradients of another batch."""
    if index % 3 == 2:
        with module.no_sync():
            zoo.loss_of(module(**zoo.inputs("plain", seed=100 + index))).backward()
    return zoo.loss_of(module(**zoo.inputs("plain", seed=index)))


def _on_two_ranks() -> dict[str, Any]:
    """Functional collectives and checks of ids as on an accelerator, replicated parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sp_compiler.runtime.group.is_gloo", lambda *_: False)
        patch.setattr("sp_compiler.passes.normalize.checked_ids.DEVICES", ("cpu",))
        patch.setattr("sp_compiler.ops.gpu.checked_ids.is_on_host", lambda ids: False)
        pools = record_on_cpu(patch)
        models = [zoo.build("plain", layers=1, dropout=0.1) for _ in range(2)]
        plain, recorded = (
            _trained(model, _accumulated, cuda_graphs=on, tp=2)
            for model, on in zip(models, (False, True), strict=True)
        )
    return {"plain": plain, "recorded": recorded, "replays": _replays(pools)}


@pytest.mark.slow
def test_ranks_replay_their_collectives() -> None:
    for results in run_on_ranks(2, _on_two_ranks):
        plain, recorded = results["plain"], results["recorded"]
        assert recorded[0] == plain[0]
        for name, value in plain[1].items():
            assert torch.equal(recorded[1][name], value), name
        # The third and the sixth step put off gradients, or take what was put off.
        assert results["replays"] == [4]
