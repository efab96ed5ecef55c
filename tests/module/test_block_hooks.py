"""Hooks on blocks of two ranks see, return and change what they would on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_compiler import RankMismatchError, UnsupportedError
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.two_ranks import assert_same_gradients, compiled, eager, full, run_checks
from tests.models import zoo

pytestmark = pytest.mark.slow

Hooks = Callable[[nn.Module, dict[str, Any]], None]
_SIZE = 3, 7  # rows of tokens that two ranks pad


def _block(one: Any) -> nn.Module:
    return one.get_submodule("blocks.0")


def _look(block: nn.Module, seen: dict[str, Any]) -> None:
    """At values and gradients, by hooks of modules and of tensors."""

    def forward(_: Any, args: Any, output: Tensor) -> None:
        seen["args"] = [arg.detach().clone() for arg in args]
        seen["output"] = output.detach().clone()
        output.register_hook(lambda grad: seen.update({"gradient of output": grad.clone()}))
        args[0].register_hook(lambda grad: seen.update({"gradient of input": grad.clone()}))

    def backward(_: Any, grad_input: Any, grad_output: Any) -> None:
        seen["backward"] = [grad.clone() for grad in (*grad_input, *grad_output)]

    def before(kind: str) -> Any:
        return lambda _, args: seen.update({kind: [arg.detach().clone() for arg in args]})

    block.register_forward_hook(forward)
    block.register_forward_pre_hook(before("before forward"))
    block.register_full_backward_hook(backward)
    block.register_full_backward_pre_hook(before("before backward"))


def _return_others(block: nn.Module, seen: dict[str, Any]) -> None:
    """Values, and gradients, that depend on all tokens."""
    block.register_forward_pre_hook(lambda _, args: args[0] * args[0].std(1, keepdim=True))
    block.register_forward_hook(lambda _, args, output: output - output.mean(1, keepdim=True))
    block.register_full_backward_hook(lambda _, grads, __: (grads[0] - grads[0].mean(),))
    block.register_full_backward_pre_hook(lambda _, grads: (grads[0].flip(1),))


def _change_in_place(block: nn.Module, seen: dict[str, Any]) -> None:
    def forward(_: Any, args: Any, output: Tensor) -> None:
        output[:, :1] *= 2

    block.register_forward_hook(forward)


def _keep_for_the_loss(block: nn.Module, seen: dict[str, Any]) -> None:
    block.register_forward_hook(lambda _, args, output: seen.update(kept=output))


def _same_steps(hooks: Hooks, *sizes: tuple[int, int], **options: Any) -> None:
    module, model = compiled(**options), eager()
    inputs = zoo.inputs("plain", *_SIZE)
    for size in sizes:
        module(**zoo.inputs("plain", *size))
    seen: list[dict[str, Any]] = [{}, {}]
    for one, values in zip((module, model), seen, strict=True):
        hooks(_block(one), values)
        loss = zoo.loss_of(one(**inputs))
        if "kept" in values:
            loss = loss + values["kept"].square().mean()
            values["kept"] = values["kept"].detach()
        loss.backward()
        values["loss"] = full(loss)
        if hooks is not _look:  # which registers hooks of tensors that need gradients
            with torch.no_grad():
                values["without gradients"] = full(zoo.loss_of(one(**inputs)))
            values.pop("kept", None)
    torch.testing.assert_close(*seen, rtol=1e-9, atol=1e-12)
    assert_same_gradients(module, model)


def _with_sequence_parallelism() -> None:
    for hooks in (_look, _return_others, _change_in_place, _keep_for_the_loss):
        _same_steps(hooks, (2, 4), (2, 6))  # the second compiles for all sizes


def _without_sequence_parallelism() -> None:
    for hooks in (_look, _return_others, _change_in_place, _keep_for_the_loss):
        _same_steps(hooks, sequence_parallel=False)


def _other_shapes_are_refused() -> None:
    module = compiled()
    module(**zoo.inputs("plain"))
    _block(module).register_forward_hook(lambda _, args, output: output[:, 1:])
    with pytest.raises(UnsupportedError, match=r"hook on 'blocks.0'.*\(2, 11, 32\) instead of"):
        module(**zoo.inputs("plain"))


def _half_batches_are_refused() -> None:
    module = compiled(half_batches=True)
    module(**zoo.inputs("plain"))
    _block(module).register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"'blocks.0' would see two half batches"):
        module(**zoo.inputs("plain"))


def _a_hook_on_one_rank_alone_is_refused() -> None:
    module = compiled()
    module(**zoo.inputs("plain"))
    if dist.get_rank() == 0:
        _block(module).register_forward_hook(lambda *_: None)
    with pytest.raises(RankMismatchError, match=r"hooks.*1 forward_hooks on blocks.0"):
        module(**zoo.inputs("plain"))


_CHECKS = (
    _with_sequence_parallelism,
    _without_sequence_parallelism,
    _other_shapes_are_refused,
    _half_batches_are_refused,
    _a_hook_on_one_rank_alone_is_refused,
)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_rehearsed(2, run_checks, _CHECKS)


@pytest.mark.parametrize("check", _CHECKS)
def test_two_ranks(check: Callable[[], None], ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        found = results[check.__name__]
        assert found is None, found
