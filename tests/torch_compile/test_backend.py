"""``torch.compile(model, backend="sp_compiler")``: against eager, alone and on two gloo ranks."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sp_compiler
import sp_compiler.torch_compile.backend
from sp_compiler.base.errors import ArgumentError, RankMismatchError, UnsupportedError
from sp_compiler.base.placement import S
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.torch_compile.backend import sp_compiler_backend
from sp_compiler.torch_compile.dynamo_graph import dotted_path
from sp_compiler.torch_compile.whole_parameters import gather_gradients
from tests.helpers.parity import gradient_error
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
_ZOO = ["gpt2", "llama", "bert", "vit", "t5", "encoder", "plain", "lora"]
_HIDDEN = 8


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_HIDDEN)
        self.up = nn.Linear(_HIDDEN, 4 * _HIDDEN)
        self.down = nn.Linear(4 * _HIDDEN, _HIDDEN)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Two blocks, a buffer that counts the calls, and what a test switches on."""

    num_calls: Tensor

    def __init__(self, p: float = 0.0, breaks: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, _HIDDEN)
        self.blocks = nn.ModuleList([Block(p), Block(p)])
        self.head = nn.Linear(_HIDDEN, 16, bias=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.breaks = breaks
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def _net(**kwargs: Any) -> Any:
    torch.manual_seed(2)
    return Net(**kwargs).double()


def _ids(batch: int = 2, seq: int = 4) -> Tensor:
    return torch.randint(0, 16, (batch, seq), generator=torch.Generator().manual_seed(1))


def _compile(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=sp_compiler_backend, options={"tp": 1, **options})


def _step(model: nn.Module, call: Any, *args: Any, **kwargs: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients, whole ones, of one forward and backward of ``call``."""
    model.zero_grad()
    loss = zoo.loss_of(call(*args, **kwargs))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _same_as_eager(compiled: Any, expected: nn.Module, model: nn.Module, ids: Tensor) -> None:
    loss, grads = _step(model, compiled, ids, ids)
    true_loss, true_grads = _step(expected, expected, ids, ids)
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
    """What the backend compiled, in order."""
    made: list[CompiledProgram] = []
    original = sp_compiler.torch_compile.backend.compile_captured

    def record(*args: Any, **kwargs: Any) -> CompiledProgram:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(sp_compiler.torch_compile.backend, "compile_captured", record)
    return made


def test_trains_like_eager_and_compiles_once(programs: list[CompiledProgram]) -> None:
    model, expected = _net(), _net()
    compiled, counter = _compile(model), model.num_calls
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, expected)]
    for _ in range(4):
        _same_as_eager(compiled, expected, model, _ids())
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
    model, expected = _net(), _net()
    compiled = _compile(model)
    for seq in (4, 6, 5, 6, 4, 5):
        _same_as_eager(compiled, expected, model, _ids(seq=seq))
    # dynamo leaves the size open at the second one; programs are for one size each.
    assert counters["stats"]["unique_graphs"] == 2
    assert len(programs) == 4


def test_dynamic_shapes_and_numbers_are_fixed_per_call(programs: list[CompiledProgram]) -> None:
    model = _net()

    @torch.compile(backend=sp_compiler_backend, dynamic=True)
    def scaled(ids: Tensor, scale: float) -> Tensor:
        return scale * model(ids, ids)

    for seq, scale in ((4, 2.0), (5, 3.5), (4, 2.0), (5, 3.5)):
        ids = _ids(seq=seq)
        torch.testing.assert_close(scaled(ids, scale), scale * model(ids, ids), rtol=1e-12, atol=0)
    assert len(programs) == 2
    assert counters["stats"]["unique_graphs"] == 1


def test_a_graph_that_writes_into_its_input_is_refused() -> None:
    @torch.compile(backend=sp_compiler_backend)
    def change(x: Tensor) -> Tensor:
        return x.add_(1)

    with pytest.raises(UnsupportedError, match="only buffers may be written"):
        change(torch.zeros(3))


def test_modes(programs: list[CompiledProgram]) -> None:
    model, expected = _net(p=0.5), _net(p=0.5)
    compiled, ids = _compile(model), _ids()
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
    ids = _ids()
    compiled = _compile(_net(p=0.5))
    torch.manual_seed(7)
    first, second = compiled(ids, ids).item(), compiled(ids, ids).item()
    torch.manual_seed(7)
    again = compiled(ids, ids).item()
    assert first == again
    assert first != second


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_graph_breaks() -> None:
    model, expected = _net(breaks=True), _net(breaks=True)
    compiled = _compile(model)
    for _ in range(3):
        _same_as_eager(compiled, expected, model, _ids())
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_blocks_compiled_one_by_one_share_a_program(programs: list[CompiledProgram]) -> None:
    model, expected = _net(), _net()
    for block in model.blocks:
        block.compile(backend=sp_compiler_backend)
    _same_as_eager(model, expected, model, _ids())
    assert len(programs) == 1


def test_checkpointing_in_the_model_is_ignored_with_a_warning() -> None:
    model, expected = _net(checkpointed=True), _net()
    compiled = _compile(model)
    with pytest.warns(UserWarning, match="recompute="):
        compiled(_ids(), _ids())  # another graph than the next: one tensor passed twice
    warnings.simplefilter("ignore")
    _same_as_eager(compiled, expected, model, _ids())


def test_frozen_parameters_and_gradients_of_inputs() -> None:
    model, expected = _net(), _net()
    for net in (model, expected):
        net.head.requires_grad_(False)
        net.blocks[0].up.requires_grad_(False)
    compiled = _compile(model)
    _same_as_eager(compiled, expected, model, _ids())
    assert model.head.weight.grad is None
    block = _compile(copy.deepcopy(model.blocks[1]))
    x = torch.randn(2, 4, _HIDDEN, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    block(x).square().sum().backward()
    model.blocks[1](y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-12, atol=1e-14)


def test_autocast() -> None:
    model, expected = _net().float(), _net().float()
    compiled, ids = _compile(model), _ids()
    with torch.autocast("cpu", torch.bfloat16):
        loss, true = compiled(ids, ids), expected(ids, ids)
    full = compiled(ids, ids)
    loss.backward()
    true.backward()
    assert loss.dtype is true.dtype
    torch.testing.assert_close(loss, true, rtol=1e-3, atol=1e-3)
    assert abs((full - expected(ids, ids)).item()) < 1e-6 < abs((full - loss).item())
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=5e-3)


def test_parameter_changed_between_forward_and_backward_is_noticed() -> None:
    model = _net()
    loss = _compile(model)(_ids(), _ids())
    with torch.no_grad():
        model.blocks[0].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tensor_parallel": 2}, ArgumentError, r"'tensor_parallel'.*allowed are tp, .*, mesh"),
        ({"outputs": "shard"}, ArgumentError, "'replicate'"),
        ({"recompute": "some"}, ArgumentError, "'selective'"),
        ({"recompute": "auto"}, ArgumentError, "memory_budget"),
        ({"tp": 0}, ArgumentError, "positive int"),
        ({"tp": 2}, ArgumentError, "init_process_group"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], message: str) -> None:
    compiled = _compile(_net(), **options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message) as caught:
        compiled(_ids(), _ids())
    assert isinstance(caught.value.inner_exception, error)


def test_modes_of_torch_compile_are_refused() -> None:
    compiled = torch.compile(_net(), backend=sp_compiler_backend, mode="reduce-overhead")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no modes"):
        compiled(_ids(), _ids())


def test_entry_point_names_the_backend() -> None:
    setup = Path(__file__).parents[2].joinpath("setup.py").read_text(encoding="utf-8")
    pattern = r'"torch_dynamo_backends": \[\s*"sp_compiler = ([\w.]+:\w+)"\s*\]'
    (target,) = re.findall(pattern, setup)
    assert target == f"{sp_compiler_backend.__module__}:{sp_compiler_backend.__name__}"


@pytest.mark.parametrize(
    ("expression", "path"),
    [
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("L['self'].bert.attention.self", "bert.attention.self"),
        ("L['self']", ""),
        ("G['model'].head", "model.head"),
        ("L['blocks'][1]._buffers['scale']", "blocks.1.scale"),
    ],
)
def test_dotted_paths(expression: str, path: str) -> None:
    assert dotted_path(expression) == path


class _Ranks:
    """Stands for the communicator of rank 0 of two whose gradients are each other's negative."""

    world_size = 2

    def __init__(self) -> None:
        self.gathered: list[int] = []

    def all_gather(self, x: Tensor, src: str, dst: str) -> Tensor:
        assert (src, dst) == ("S(0)", "I")
        self.gathered.append(x.numel())
        return torch.cat([x, -x])


def test_gradients_are_gathered_in_buckets() -> None:
    tp: Any = _Ranks()
    first = torch.arange(6.0).view(2, 3)
    second = torch.arange(4.0).view(4, 1)
    double = torch.ones(2, dtype=torch.float64)
    whole = gather_gradients(
        tp, [first, None, second, double], [S(1), S(0), S(0, (4, 4)), S(0)], bucket_bytes=40
    )
    assert whole[1] is None
    torch.testing.assert_close(whole[0], torch.cat([first, -first], 1))
    torch.testing.assert_close(
        whole[2], torch.cat([second[:2], -second[:2], second[2:], -second[2:]])
    )
    torch.testing.assert_close(whole[3], torch.cat([double, -double]))
    assert tp.gathered == [10, 2]
    gather_gradients(tp, [first, second], [S(1), S(0)], bucket_bytes=39)
    assert tp.gathered[2:] == [6, 4]


def _zoo_steps(name: str, tp: int) -> dict[str, Any]:
    """Two steps of a zoo model, compiled and eager."""
    model = zoo.build(name)
    expected = copy.deepcopy(model)
    kwargs = zoo.inputs(name)
    compiled = _compile(model, tp=tp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _step(model, compiled, **kwargs)
        first = _step(model, compiled, **kwargs)
        num_graphs = counters["stats"]["unique_graphs"]
        for _ in range(2):
            loss, grads = _step(model, compiled, **kwargs)
    true_loss, true_grads = _step(expected, expected, **kwargs)
    recompiled = counters["stats"]["unique_graphs"] - num_graphs
    torch._dynamo.reset()
    return {
        "name": name,
        "loss": abs(loss - true_loss) / abs(true_loss),
        "first": abs(first[0] - true_loss) / abs(true_loss),
        "grads": gradient_error(grads, true_grads),
        "recompiled": recompiled,
        "whole": {key: grad for key, grad in grads.items() if grad is not None},
    }


def _check_zoo(result: dict[str, Any]) -> None:
    # Models of transformers cast their norms or logits to float32.
    assert result["first"] < 1e-6
    assert result["loss"] < 1e-6
    assert result["grads"] < 1e-6
    assert result["recompiled"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", _ZOO)
def test_zoo_on_one_rank(name: str) -> None:
    _check_zoo(_zoo_steps(name, tp=1))


def _zoo_on_ranks(names: list[str]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    return [_zoo_steps(name, tp=2) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("names", [_ZOO[:2], _ZOO[2:4], _ZOO[4:5], _ZOO[5:]], ids="-".join)
def test_zoo_on_two_ranks(names: list[str]) -> None:
    ranks = run_on_ranks(2, _zoo_on_ranks, names)
    for first, second in zip(*ranks, strict=True):
        _check_zoo(first)
        for name, grad in first["whole"].items():
            assert torch.equal(grad, second["whole"][name]), f"{first['name']}: {name}"


def _net_on_ranks() -> dict[str, Any]:
    """What is cheap to do in one pair of processes; each entry is checked by one test below."""
    warnings.simplefilter("ignore")
    rank, ids = dist.get_rank(), _ids()
    model, expected = _net(), _net()
    compiled = _compile(model, tp=2)
    loss, grads = _step(model, compiled, ids, ids)
    true_loss, true_grads = _step(expected, expected, ids, ids)
    result: dict[str, Any] = {
        "loss": abs(loss - true_loss),
        "grads": gradient_error(grads, true_grads),
        "buffer": int(model.num_calls),
    }
    model.eval()
    with torch.no_grad():
        result["eval"] = abs(compiled(ids, ids).item() - expected(ids, ids).item())
    model.train()
    # A new shape on one rank alone: dynamo compiles there and finds its code on the other.
    with pytest.raises(RankMismatchError, match=r"rank 1: .*\(2, 7\)"):
        compiled(_ids(seq=4 + 3 * rank), _ids(seq=4 + 3 * rank))
    model.num_calls.zero_()
    result["after mismatch"] = abs(compiled(ids, ids).item() - true_loss)
    torch._dynamo.reset()  # dynamo on rank 1 now expects sizes to change
    dropped = _compile(_net(p=0.5), tp=2)
    torch.manual_seed(5 + rank)
    result["dropped"] = dropped(ids, ids).item()
    broken = _net(breaks=True)
    result["broken"] = gradient_error(
        _step(broken, _compile(broken, tp=2), ids, ids)[1], true_grads
    )
    return result


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, _net_on_ranks)


@pytest.mark.slow
def test_whole_gradients_on_two_ranks(on_ranks: list[dict[str, Any]]) -> None:
    for result in on_ranks:
        assert result["loss"] < 1e-12
        assert result["grads"] < 1e-12
        assert result["broken"] < 1e-12
        assert result["eval"] < 1e-12
        assert result["buffer"] == 1


@pytest.mark.slow
def test_mismatched_ranks_raise_and_go_on(on_ranks: list[dict[str, Any]]) -> None:
    assert all(result["after mismatch"] < 1e-12 for result in on_ranks)


@pytest.mark.slow
def test_dropout_is_that_of_one_rank(on_ranks: list[dict[str, Any]]) -> None:
    """Ranks use the first one's seed, and the masks do not depend on their number."""
    alone = _compile(_net(p=0.5))
    torch.manual_seed(5)
    loss = alone(_ids(), _ids()).item()
    assert [result["dropped"] for result in on_ranks] == pytest.approx([loss, loss], rel=1e-12)
