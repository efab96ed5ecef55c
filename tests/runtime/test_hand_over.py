"""Steps in which each layer's backward leaves a gradient to the layer before it, and when it must
not."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compiler
from benchmarks.models import PlainGPT
from sp_compiler.base.errors import UnsupportedError
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

_NAMES = ("backward", "backward_inputs", "backward_behind", "backward_weights")
_WHOLE = ["backward_inputs", *["backward_behind"] * (LAYERS - 1), "backward_weights"]
_functions = functools.partial(functions, names=_NAMES)


@pytest.fixture(scope="module")
def clock() -> Iterator[Any]:
    with sp_compiler.emulated_group(2, hardware=SLOW) as clock:
        yield clock


@pytest.fixture(scope="module")
def alone(clock: Any) -> Any:
    return compiled(overlap=False)


@pytest.fixture(scope="module")
def handing(clock: Any) -> Any:
    return compiled()


def _without_dropout(model: PlainGPT) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def _late_and_early(module: Any) -> tuple[str, str]:
    """Names of two weights of a layer; the gradient of the first is left to the layer before."""
    region = module._sp_state.latest.regions["Block"]
    names = [name for name in region.region.input_names if name.endswith(("weight", "bias"))]
    split = region.partitioned.split
    late = [region.region.input_names[index] for index in split.late]
    assert late
    early = next(n for n in names if n not in late and "norm" not in n and n.endswith("weight"))
    return f"blocks.2.{late[0]}", f"blocks.2.{early}"


def test_a_step_takes_its_planned_time(clock: Any) -> None:
    """Without dropout, whose many small operators the clock sees, and a plan as one."""
    module = compiled(_without_dropout)
    loss = loss_of(module)
    clock.reset()
    loss.backward()
    planned_us = module.plan.schedule.exposed_us["backward"]
    assert clock.exposed_us["backward"] == pytest.approx(planned_us, rel=1e-6)


def test_next_to_nothing_is_exposed(clock: Any, alone: Any, handing: Any) -> None:
    exposed_us, grads = [], []
    for module in (alone, handing):
        loss = loss_of(module)
        clock.reset()
        loss.backward()
        exposed_us.append(clock.exposed_us["backward"])
        grads.append(take_gradients(module))
    assert exposed_us[1] < 0.1 * exposed_us[0]
    assert same(*grads)


def test_a_graph_runs_twice_and_in_part(handing: Any) -> None:
    loss = loss_of(handing)
    with _functions(handing) as ran:
        loss.backward(retain_graph=True)
    assert ran == _WHOLE
    grads = take_gradients(handing)
    with _functions(handing) as ran:
        loss.backward(retain_graph=True)
    assert ran == _WHOLE
    assert same(take_gradients(handing), grads)
    # What nobody asks for is not computed.
    late, early = _late_and_early(handing)
    own = ["backward_inputs"] * 2
    for name, expected in ((early, own), (late, [*own, "backward_weights"])):
        parameter = handing.get_parameter(name)
        with _functions(handing) as ran:
            (grad,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        assert ran == expected
        assert torch.equal(grad.to_local(), grads[name])
        loss.backward(inputs=[parameter], retain_graph=True)
        assert torch.equal(take_gradients(handing)[name], grads[name])


def test_forwards_before_their_backwards(alone: Any, handing: Any) -> None:
    grads = []
    for module in (alone, handing):
        first, second = loss_of(module), loss_of(module, IDS.flip(1))
        first.backward()
        second.backward()  # added to the first
        both = loss_of(module) * 2 + loss_of(module, IDS.flip(1))
        both.backward()
        grads.append(take_gradients(module))
    assert same(*grads)


def test_hooks_of_a_parameter_see_its_gradient(alone: Any, handing: Any) -> None:
    """Once, whole; a hook of one layer's gradient makes nothing of another's."""
    seen: list[tuple[str, Tensor]] = []
    grads = []

    def hook(grad: Any) -> Any:
        seen.append(("hook", grad.to_local()))
        return grad * 2

    def after(parameter: Any) -> None:
        seen.append(("after", parameter.grad.to_local().clone()))

    for module in (alone, handing):
        parameter = module.get_parameter(_late_and_early(handing)[0])
        handles = [
            parameter.register_hook(hook),
            parameter.register_post_accumulate_grad_hook(after),
        ]
        loss_of(module).backward()
        for handle in handles:
            handle.remove()
        grads.append(take_gradients(module))
    assert same(*grads)
    assert [what for what, _ in seen] == ["hook", "after"] * 2
    assert torch.equal(seen[0][1], seen[2][1])
    assert torch.equal(seen[1][1], seen[3][1])


def test_a_failed_backward_leaves_nothing_wrong(alone: Any, handing: Any) -> None:
    """Neither for the same graph, nor for the next step."""
    loss_of(alone).backward()
    grads = take_gradients(alone)
    fails = iter([True, False])

    def failing(grad: Tensor) -> None:
        if next(fails):
            raise ArithmeticError("in the middle")

    layer = handing.get_submodule("blocks.1")
    handle = layer.register_forward_hook(lambda module, args, output: watch(output))

    def watch(output: Tensor) -> None:
        output.register_hook(failing)

    loss = loss_of(handing)
    handle.remove()
    with pytest.raises(ArithmeticError, match="in the middle"):
        loss.backward(retain_graph=True)
    handing.zero_grad()
    with _functions(handing) as ran:
        loss.backward()
    assert ran == _WHOLE
    assert same(take_gradients(handing), grads)
    loss_of(handing).backward()
    assert same(take_gradients(handing), grads)


def _with_another_within(module: Any, late: str) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of a backward, and of one of the same graph that a hook runs in its middle."""
    outputs: list[Tensor] = []
    layer = module.get_submodule("blocks.1")
    handle = layer.register_forward_hook(lambda module, args, output: outputs.append(output))
    loss = loss_of(module)
    handle.remove()
    within: list[Any] = []

    def hook(_: Tensor) -> None:
        if not within:
            within.append(None)  # that backward comes here too
            within[:] = torch.autograd.grad(loss, module.get_parameter(late), retain_graph=True)

    outputs[0].register_hook(hook)
    loss.backward(retain_graph=True)
    return take_gradients(module), within[0].to_local()


def test_a_backward_within_a_backward_of_the_same_graph(alone: Any, handing: Any) -> None:
    """Neither takes what the other has left."""
    late, _ = _late_and_early(handing)
    grads, within = _with_another_within(handing, late)
    expected, _ = _with_another_within(alone, late)
    assert same(grads, expected)
    assert torch.equal(within, expected[late])


def test_a_failed_backward_leaves_nothing_in_memory(handing: Any) -> None:
    """Once its graph is gone, although autograd's queue may still have the last node."""
    code = handing._sp_state.latest.codes["Block"]
    left: list[weakref.ref[Tensor]] = []

    def watched(*args: Any, function: Any = code.backward_inputs) -> Any:
        grads, rest = function(*args)
        left.extend(map(weakref.ref, rest))
        return grads, rest

    def fails(_: Tensor) -> None:
        raise ArithmeticError("in the middle")

    layer = handing.get_submodule(f"blocks.{LAYERS - 2}")
    handle = layer.register_forward_hook(lambda module, args, output: watch(output))

    def watch(output: Tensor) -> None:
        output.register_hook(fails)

    with (
        mock.patch.object(code, "backward_inputs", staticmethod(watched)),
        contextlib.suppress(ArithmeticError),
    ):
        loss_of(handing).backward()
    handle.remove()
    handing.zero_grad()
    gc.collect()
    assert left
    assert not [each for each in left if each() is not None]


@pytest.mark.parametrize("changed", [Tensor.detach, torch.sin, Tensor.sin_])
def test_hooks_between_layers(
    alone: Any, handing: Any, changed: Callable[[Tensor], Tensor]
) -> None:
    """The gradient that a layer's backward is given may be another than the one behind returned."""
    grads = []
    for module in (alone, handing):
        layer = module.get_submodule("blocks.1")
        handle = layer.register_forward_hook(lambda module, args, output: changed(output))
        loss = loss_of(module)
        handle.remove()
        with _functions(module) if module is handing else mock.MagicMock() as ran:
            loss.backward()
        grads.append(take_gradients(module))
    assert same(*grads)
    assert ran == ([*_WHOLE[:2], _WHOLE[-1]] if changed is Tensor.detach else _WHOLE)


def test_another_use_of_a_layers_output(alone: Any, handing: Any) -> None:
    """The layer waits for that gradient too, while the one behind it computes what it has left."""
    grads = []
    for module in (alone, handing):
        outputs: list[Tensor] = []

        def keep(_: Any, args: Any, output: Tensor, kept: list[Tensor] = outputs) -> Tensor:
            # Younger than the layer behind, and a product of it that autograd has to run later.
            kept.append(output.square().mean())
            return output

        handle = module.get_submodule("blocks.1").register_forward_hook(keep)
        loss = loss_of(module)
        handle.remove()
        (loss + outputs[0]).backward()
        grads.append(take_gradients(module))
    assert same(*grads)


def test_saved_tensors_that_hooks_unpack_once(alone: Any, handing: Any) -> None:
    loss_of(alone).backward()
    with _functions(handing) as ran:
        checkpoint(loss_of, handing, use_reentrant=False).backward()
    assert ran == ["backward"] * LAYERS
    assert same(take_gradients(handing), take_gradients(alone))


def test_a_gradient_of_a_late_gradient_is_refused(handing: Any) -> None:
    late = handing.get_parameter(_late_and_early(handing)[0])
    (grad,) = torch.autograd.grad(loss_of(handing), late, create_graph=True)
    with pytest.raises(UnsupportedError, match="create_graph"):
        grad.to_local().sum().backward()
    handing.zero_grad()


@pytest.mark.slow
def test_functions_for_inductor(clock: Any) -> None:
    with graphs_interpreted():
        module = compiled(PlainGPT.float, backend="inductor")
        loss_of(module).backward()
        grads = take_gradients(module)
        checkpoint(loss_of, module, use_reentrant=False).backward()
    _late_and_early(module)
    for name, grad in take_gradients(module).items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_real_ranks() -> None:
    assert run_on_ranks(2, step_on_a_rank, _NAMES, "selective") == [(_WHOLE, True)] * 2
