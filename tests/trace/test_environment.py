"""What is set aside while a model is captured."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils._traceback import CapturedTraceback

from sp_compiler.base.errors import CaptureError, SPCompilerError, UnsupportedError
from sp_compiler.trace.capture_errors import users_frames
from sp_compiler.trace.environment import without_cache
from sp_compiler.trace.export import capture
from sp_compiler.trace.tracer_patches import frames_made_once
from tests.helpers import parity
from tests.models import zoo


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_says_that_there_is_no_cache(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    model = zoo.build("llama", use_cache=True)
    said = contextlib.nullcontext() if rank else pytest.warns(UserWarning, match="keeps no cache")
    with said, without_cache(model, asked=True):
        assert model.config.use_cache is False  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "warns"), [("bert", False), ("gpt2", True), ("t5", True), ("no attention", True)]
)
def test_a_model_that_keeps_no_cache_misses_none(name: str, warns: bool) -> None:
    """The default of HuggingFace's configurations, which no user has set, is True for all."""
    if name == "no attention":
        model: nn.Module = nn.Linear(2, 2)
        model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    else:
        model = zoo.build(name, use_cache=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for argument in (False, None):  # of a call that asks for none, and of one without
            assert not said
            with without_cache(model, asked=argument):
                assert model.config.use_cache is False  # type: ignore[union-attr]
    assert [("keeps no cache" in str(each.message)) for each in said] == [True] * warns


def test_libraries_behind_symbolic_links_are_no_lines_of_the_user(tmp_path: Path) -> None:
    """Environments are often reached through one, and files are named as they were reached."""
    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    by_library: dict[str, Any] = {}
    source = "def call(function):\n    return function()"
    file = tmp_path / "torch" / "nn" / "modules" / "module.py"
    exec(compile(source, file, "exec"), by_library)

    def of_the_user() -> None:
        raise KeyError

    with pytest.raises(KeyError) as caught:
        by_library["call"](of_the_user)
    frames = traceback.extract_tb(users_frames(caught.tb))
    assert {frame.filename for frame in frames} == {__file__}
    assert frames[-1].name == "of_the_user"


class _BiasOfPairs(nn.Module):
    """Adds a number of each pair of tokens' groups, as masks of transformers are made."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor, groups: Tensor) -> Tensor:
        def bias(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.table[groups[batch, query], groups[batch, key]]

        keys = torch.vmap(bias, (None, None, 0))
        every = torch.vmap(torch.vmap(keys, (None, 0, None)), (0, None, None))
        positions = torch.arange(x.shape[1])
        with TransformGetItemToIndex():
            biases = every(torch.arange(x.shape[0]), positions, positions)
        return biases.softmax(-1) @ x


def test_vmap_indexes_with_the_numbers_that_it_hands_out() -> None:
    torch.manual_seed(0)
    model = _BiasOfPairs()
    x, groups = torch.randn(2, 6, 8, dtype=torch.float64), torch.randint(4, (2, 6))
    case = parity.make_case(model, {"x": x, "groups": groups})
    expected = model(x, groups)
    expected.backward(torch.ones_like(expected))
    torch.testing.assert_close(case.outputs[0], expected.detach())
    torch.testing.assert_close(case.grads["table"], model.table.grad)
    assert model.table.grad is not None


class _Converting(nn.Module):
    """As a router that computes in float32 whatever the model does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.gate = self.gate.to(torch.float32)
        result: Tensor = self.gate(x.float())
        return result.square().mean()


def test_a_module_converted_to_what_it_is_stays() -> None:
    model, x = _Converting(), torch.randn(2, 4)
    weight = model.gate.weight
    captured = parity.make_case(model, {"x": x}, lift_casts=False)
    loss = model(x)
    loss.backward()
    torch.testing.assert_close(captured.outputs[0], loss)
    torch.testing.assert_close(captured.grads["gate.weight"], weight.grad)
    assert model.gate.weight is weight


def test_a_module_converted_to_something_else_is_refused() -> None:
    model = _Converting().double()
    said = r"converts the Linear from torch.float64 on cpu to torch.float32.*\n.*module: \(model\)"
    with pytest.raises(UnsupportedError, match=said):
        capture(model, (torch.randn(2, 4),))
    assert model.gate.weight.dtype is torch.float64


def test_hooks_that_compute_a_weight_are_refused_with_what_needs_none() -> None:
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.ReLU())
    with pytest.raises(UnsupportedError, match=r"'0' \(Linear\) has hooks.*parametrizations"):
        capture(model, (torch.randn(2, 4),))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_hook(print)
    with pytest.raises(UnsupportedError, match=r"'0' \(Linear\) has hooks.*on the compiled module"):
        capture(model, (torch.randn(2, 4),))


def test_a_default_dtype_set_in_forward_is_refused_with_its_line() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_default_dtype(torch.float64)
            try:
                return x * torch.ones(2)
            finally:
                torch.set_default_dtype(torch.float32)

    with pytest.raises(UnsupportedError, match=r"default dtype to torch\.float64.*test_environ"):
        capture(Model(), (torch.randn(2),))
    assert torch.get_default_dtype() is torch.float32


def _square(x: Tensor) -> Tensor:
    return x.square().sum()


@pytest.mark.parametrize(
    "derivative",
    [
        lambda x: torch.func.grad(_square)(x),
        lambda x: torch.func.jvp(_square, (x,), (x,))[1],
        lambda x: torch.func.vmap(torch.func.vjp(_square, x)[1])(x)[0],
        lambda x: torch.func.jacfwd(_square)(x),
    ],
)
def test_a_derivative_in_forward_is_refused_with_its_line(
    derivative: Callable[[Tensor], Tensor],
) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * derivative(x)).sum()

    said = r"with torch\.func .*test_environment\.py:\d+ lambda x: torch\.func.*; write .* by hand"
    with pytest.raises(UnsupportedError, match=said):
        capture(Model(), (torch.randn(2),))
    # Torch's own error of jvp would leave this refused.
    assert torch.randn(2).requires_grad_().requires_grad
    assert torch.equal(torch.func.grad(_square)(torch.ones(2)), 2 * torch.ones(2))


class _Rescaled(nn.Module):
    """An embedding that writes into its weight, which the head may read, too."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4, max_norm=1.0), nn.Linear(4, 5)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.table(ids))
        return result


@pytest.mark.parametrize(
    ("is_tied", "said"),
    [(False, r"(?s)max_norm of an embedding.*module: table"), (True, "embedding with max_norm")],
)
def test_an_embedding_that_rescales_its_rows_is_refused_by_name(is_tied: bool, said: str) -> None:
    with pytest.raises(SPCompilerError, match=said):
        capture(_Rescaled(is_tied), (torch.arange(4),))


def test_a_dim_that_vmap_puts_elsewhere_is_refused_by_name() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.vmap(lambda row: row @ x, out_dims=1)(x)
            return result

    with pytest.raises(CaptureError, match=r"out_dims of torch\.vmap.*\n.* with movedim"):
        capture(Model(), (torch.randn(3, 3),))


def test_frames_of_tracebacks_are_made_once() -> None:
    """Those of two nodes share all frames but the innermost, and say what torch's own say."""

    def stacks() -> tuple[traceback.StackSummary, traceback.StackSummary]:
        first, second = CapturedTraceback.extract().summary(), CapturedTraceback.extract().summary()
        return first, second

    found = []
    for context in (frames_made_once(), contextlib.nullcontext()):
        with context:
            found.append(stacks())
    (one, two), (plain, other) = found
    assert len(one) > 10
    assert all(a is b for a, b in zip(one, two, strict=True))
    assert not any(a is b for a, b in zip(plain, other, strict=True))
    assert one.format() == plain.format()
    assert "found.append(stacks())" in one.format()[-2]


class _Refusing(nn.Module):
    """Raises what Dynamo does in ``torch.cond`` of an operand with a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError(
            "This higher order operator doesn't work unless it is captured completely\n"
            "  Higher Order Operator: torch.cond"
        )


def test_control_flow_that_dynamo_refuses_is_named() -> None:
    with pytest.raises(CaptureError, match=r"(?s)cond calls functions.*what to do: .*torch\.where"):
        capture(_Refusing(), (torch.randn(2, 8),), {})


def test_a_branch_for_tracers_that_fails() -> None:
    """As the encoder of Switch Transformers without a mask, which runs in eager mode."""

    class Branch(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is None and not torch.compiler.is_compiling():
                mask = torch.ones_like(x)
            return x * mask[:, None]  # type: ignore[index]

    with pytest.raises(CaptureError, match=r"look for torch\.compiler\.is_compiling\(\) in it"):
        capture(Branch(), (torch.ones(2),))
