"""Steps in which each layer's backward recomputes for the layer before it, and when it must not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sp_compiler
from benchmarks.models import PlainGPT
from tests.helpers.calls_in_a_row import (
    IDS,
    LAYERS,
    SLOW,
    compiled,
    functions,
    graphs_interpreted,
    loss_of,
    same,
    step_on_a_rank,
    take_gradients,
)
from tests.helpers.ranks import run_on_ranks

_NAMES = ("backward", "recompute", "backward_ahead", "backward_rest")
_compiled = functools.partial(compiled, recompute="full")
_functions = functools.partial(functions, names=_NAMES)


@pytest.fixture(scope="module")
def clock() -> Iterator[Any]:
    with sp_compiler.emulated_group(2, hardware=SLOW) as clock:
        yield clock


@pytest.fixture(scope="module")
def alone(clock: Any) -> Any:
    return _compiled(overlap=False)


@pytest.fixture(scope="module")
def ahead(clock: Any) -> Any:
    return _compiled()


_SINGLE = ["recompute", "backward_rest"]
_WHOLE = ["recompute", *["backward_ahead"] * (LAYERS - 1), "backward_rest"]


@pytest.mark.slow
def test_a_step_takes_its_planned_time(clock: Any, alone: Any, ahead: Any) -> None:
    exposed_us, grads = [], []
    for module in (alone, ahead):
        loss = loss_of(module)
        clock.reset()
        loss.backward()
        exposed_us.append(clock.exposed_us["backward"])
        planned_us = module.plan.schedule.exposed_us["backward"]
        assert exposed_us[-1] == pytest.approx(planned_us, rel=0.05)
        grads.append(take_gradients(module))
    assert exposed_us[1] < 0.7 * exposed_us[0]
    assert same(*grads)


class _Three:
    """The code of a backend that has no functions for calls that work for others."""

    def __init__(self, code: Any) -> None:
        self.forward, self.backward = code.forward, code.backward


def test_layers_work_alone_where_a_backend_has_no_functions_for_more(ahead: Any) -> None:
    loss_of(ahead).backward()
    expected = take_gradients(ahead)
    compiled = ahead._sp_state.latest
    codes: Any = {name: _Three(code) for name, code in compiled.codes.items()}
    module = _compiled()
    executor = module._sp_state.executor(replace(compiled, codes=codes))
    module._sp_state.programs = module._sp_state.programs.mapped(lambda _: executor)
    loss_of(module).backward()
    assert same(expected, take_gradients(module))


def test_a_graph_runs_twice_and_in_part(clock: Any, ahead: Any) -> None:
    loss = loss_of(ahead)
    loss.backward(retain_graph=True)
    grads, busy_us = take_gradients(ahead), clock.busy_us["backward"]
    with _functions(ahead) as ran:
        loss.backward(retain_graph=True)
    assert ran == _WHOLE
    assert same(take_gradients(ahead), grads)
    whole_us, busy_us = clock.busy_us["backward"] - busy_us, clock.busy_us["backward"]
    # Two layers of four, and nothing for the others.
    name = "blocks.2.mlp.up.weight"
    with _functions(ahead) as ran:
        (grad,) = torch.autograd.grad(loss, ahead.get_parameter(name), retain_graph=True)
    assert ran == ["recompute", "backward_ahead", "backward_rest"]
    assert torch.equal(grad.to_local(), grads[name])
    assert clock.busy_us["backward"] - busy_us < 0.6 * whole_us
    loss.backward(inputs=[ahead.get_parameter(name)])
    assert torch.equal(take_gradients(ahead)[name], grads[name])


@pytest.mark.slow
def test_forwards_before_their_backwards(alone: Any, ahead: Any) -> None:
    grads = []
    for module in (alone, ahead):
        first, second = loss_of(module), loss_of(module, IDS.flip(1))
        first.backward()
        second.backward()
        both = loss_of(module) * 2 + loss_of(module, IDS.flip(1))
        both.backward()
        grads.append(take_gradients(module))
    assert same(*grads)


def test_a_failed_backward_leaves_nothing_wrong(alone: Any, ahead: Any) -> None:
    """Neither for the same graph, nor for the next step."""
    loss_of(alone).backward()
    grads = take_gradients(alone)
    fails = [True]

    def failing(grad: Tensor) -> None:
        if fails.pop():
            fails.append(False)
            raise ArithmeticError("in the middle")
        fails.append(False)

    def watch(module: Any, args: Any, output: Any) -> None:
        output.register_hook(failing)

    handle = ahead.get_submodule("blocks.1").register_forward_hook(watch)
    loss = loss_of(ahead)
    handle.remove()
    with pytest.raises(ArithmeticError, match="in the middle"):
        loss.backward(retain_graph=True)
    ahead.zero_grad()
    with _functions(ahead) as ran:
        loss.backward()
    assert ran == _WHOLE
    assert same(take_gradients(ahead), grads)
    loss_of(ahead).backward()
    assert same(take_gradients(ahead), grads)


@pytest.mark.parametrize("changed", [Tensor.detach, torch.sin, Tensor.sin_])
def test_hooks_between_layers(alone: Any, ahead: Any, changed: Callable[[Tensor], Tensor]) -> None:
    grads = []
    for module in (alone, ahead):
        layer = module.get_submodule("blocks.1")
        handle = layer.register_forward_hook(lambda module, args, output: changed(output))
        loss = loss_of(module)
        handle.remove()
        with _functions(module) if module is ahead else mock.MagicMock() as ran:
            loss.backward()
        grads.append(take_gradients(module))
    assert same(*grads)
    assert ran == ([*_WHOLE[:2], _WHOLE[-1]] if changed is Tensor.detach else _WHOLE)


def test_saved_tensors_that_hooks_unpack_once(alone: Any, ahead: Any) -> None:
    loss_of(alone).backward()
    with _functions(ahead) as ran:
        loss = checkpoint(loss_of, ahead, use_reentrant=False)
        loss.backward()
    assert ran == ["backward"] * LAYERS
    assert same(take_gradients(ahead), take_gradients(alone))


def test_saved_tensors_that_hooks_around_one_layer_unpack(alone: Any, ahead: Any) -> None:
    """The layer behind it recomputes for no other."""
    loss_of(alone).backward()
    layer = ahead.get_submodule("blocks.1")
    with ExitStack() as hooks:
        pack = torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value)
        handles = [
            layer.register_forward_pre_hook(lambda *_: hooks.enter_context(pack) and None),
            layer.register_forward_hook(lambda *_: hooks.close()),
        ]
        loss = loss_of(ahead)
    for handle in handles:
        handle.remove()
    with _functions(ahead) as ran:
        loss.backward()
    assert ran == ["recompute", "backward_ahead", "backward_rest", "backward", *_SINGLE]
    assert same(take_gradients(ahead), take_gradients(alone))


def test_a_reentrant_checkpoint(alone: Any, ahead: Any) -> None:
    """Its backward runs within another."""
    scale = torch.ones((), requires_grad=True)
    loss_of(alone).backward()
    with _functions(ahead) as ran:
        loss = checkpoint(lambda scale: loss_of(ahead) * scale, scale, use_reentrant=True)
        loss.backward()
    assert ran == _WHOLE
    assert same(take_gradients(ahead), take_gradients(alone))


def test_a_parameter_that_was_changed_is_noticed(ahead: Any) -> None:
    loss = loss_of(ahead)
    with torch.no_grad():
        ahead.get_parameter("blocks.2.mlp.up.weight").mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    ahead.zero_grad()


@pytest.mark.slow
def test_layers_without_gradients_are_not_recomputed(clock: Any) -> None:
    def freeze(model: PlainGPT) -> None:
        for part in (model.token_embedding, model.position_embedding, *model.blocks[:2]):
            part.requires_grad_(False)

    grads = []
    for overlap in (False, True):
        module = _compiled(freeze, overlap=overlap)
        loss_of(module).backward()
        grads.append(take_gradients(module))
    assert same(*grads)


@pytest.mark.slow
def test_functions_for_inductor(clock: Any) -> None:
    with graphs_interpreted():
        module = _compiled(PlainGPT.float, backend="inductor")
        with _functions(module) as ran:
            loss_of(module).backward()
        assert ran == _WHOLE
        grads = take_gradients(module)
        checkpoint(loss_of, module, use_reentrant=False).backward()
    for name, grad in take_gradients(module).items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_real_ranks() -> None:
    assert run_on_ranks(2, step_on_a_rank, _NAMES, "full") == [(_WHOLE, True)] * 2
