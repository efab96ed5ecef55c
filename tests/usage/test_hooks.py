"""Hooks on parameters, blocks and the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sp_compiler
from sp_compiler import UnsupportedError
from tests.helpers.users import batch, compiled, net, prepared


@pytest.fixture
def module() -> Any:
    """A compiled module, fresh for each test."""
    return prepared()


def test_parameter_hooks(module: Any) -> None:
    """A hook that changes the gradient, and one that sees the accumulated one."""
    model = net()
    for one in (module, model):
        weight = one.get_parameter("blocks.0.up.weight")
        weight.register_hook(lambda grad: 2 * grad)
        seen: list[Tensor] = []
        weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        for _ in range(2):
            one(batch())["loss"].backward()
        torch.testing.assert_close(seen[1], 2 * seen[0])
    torch.testing.assert_close(
        module.get_parameter("blocks.0.up.weight").grad,
        model.get_parameter("blocks.0.up.weight").grad,
        rtol=1e-10,
        atol=0,
    )


def test_an_optimizer_in_the_backward(module: Any) -> None:
    """One optimizer per parameter, stepped as soon as its gradient is there."""
    model = net()
    for one in (module, model):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in one.parameters()}

        def step(parameter: Tensor, optimizers: Any = optimizers) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in one.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            one(batch())["loss"].backward()
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-9, atol=0
    )


def test_hooks_on_the_whole_model(module: Any) -> None:
    module.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    module.register_forward_hook(lambda m, args, out: {**out, "extra": 1})
    x = batch().requires_grad_()
    out = module(x)
    out["loss"].backward()
    assert out["extra"] == 1
    other = batch().requires_grad_()
    expected = net()(2 * other)["loss"]
    expected.backward()
    torch.testing.assert_close(out["loss"], expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-10, atol=0)


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _remember(seen: list[Tensor]) -> Any:
    """A backward hook that appends the gradients it is given."""

    def hook(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> None:
        seen.extend((*grad_inputs, *grad_outputs))

    return hook


def test_backward_hooks_on_the_whole_model() -> None:
    found = []
    for one in (_layers(), sp_compiler.compile(_layers(), tp=1)):
        seen: list[Tensor] = []
        one.register_full_backward_pre_hook(lambda m, grads: (3 * grads[0],))
        one.register_full_backward_hook(_remember(seen))
        one(batch().requires_grad_()).square().sum().backward()
        found.append([*seen, *[parameter.grad for parameter in one.parameters()]])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=0)


def test_hooks_that_the_model_had_before_move_along() -> None:
    model, calls = net(), []
    model.register_forward_hook(lambda *args: calls.append("forward"))
    module = sp_compiler.compile(model, tp=1)
    module(batch())
    assert calls == ["forward"]


def test_hooks_on_blocks_run(module: Any) -> None:
    """With what they are given on the model's own layer."""
    seen: list[list[Any]] = [[], []]
    for one, values in zip((module, net()), seen, strict=True):
        block, note = one.get_submodule("blocks.1"), values.append
        handles = [
            block.register_forward_pre_hook(lambda _, args, note=note: note(args)),
            block.register_forward_hook(lambda _, args, out, note=note: note((args, out))),
            block.register_full_backward_pre_hook(lambda _, grads, note=note: note(grads)),
            block.register_full_backward_hook(lambda _, *grads, note=note: note(grads)),
        ]
        one(batch())["loss"].backward()
        for handle in handles:
            handle.remove()
        one(batch())
    assert len(seen[0]) == 4
    torch.testing.assert_close(*seen, rtol=1e-10, atol=1e-15)


def test_what_hooks_on_blocks_return(module: Any) -> None:
    block = module.blocks[1]
    for register, hook, said in (
        (block.register_forward_hook, lambda _, args, out: out[1:], r"\(3, 6, 8\) instead of"),
        (block.register_forward_hook, lambda _, args, out: out.float(), "float32 .* instead of"),
        (block.register_forward_pre_hook, lambda _, args: (*args, 1), "2 values instead of 1"),
    ):
        handle = register(hook)
        with pytest.raises(UnsupportedError, match=rf"hook on 'blocks.1' returned .*{said}"):
            module(batch())
        handle.remove()
    with pytest.raises(UnsupportedError, match="use register_full_backward_hook"):
        block.register_backward_hook(lambda *_: None)


def test_a_gradient_that_would_be_lost_raises() -> None:
    """Of what a hook adds behind frozen layers, whose compiled code has no backward."""
    model = net()
    model.requires_grad_(False)
    model.get_submodule("head").requires_grad_(True)
    module: Any = sp_compiler.compile(model, tp=1)
    added = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    changes: tuple[tuple[Any, Any], ...] = (
        (module.blocks[1].register_forward_hook, lambda _, args, out: out + added),
        (module.blocks[1].register_forward_pre_hook, lambda _, args: (args[0] + added,)),
        (
            module.blocks[1].register_forward_pre_hook,
            lambda _, args: setattr(args[0], "requires_grad", True),
        ),
    )
    for register, hook in changes:
        module(batch())
        handle = register(hook)
        with pytest.raises(UnsupportedError, match=r"requires a gradient where .* does not"):
            module(batch())
        with torch.no_grad():
            module(batch())
        handle.remove()


def test_hooks_run_under_the_callers_autocast() -> None:
    module: Any = sp_compiler.compile(net().float(), tp=1)
    seen: list[Any] = []
    with torch.autocast("cpu", torch.bfloat16):
        module(batch().float())
        module.blocks[0].register_forward_hook(
            lambda _, args, out: seen.append((out @ out.mT).dtype)
        )
        module(batch().float())
    assert seen == [torch.bfloat16]


def test_hooks_inside_blocks_raise_before_and_after_compilation(module: Any) -> None:
    model = net()
    model.blocks[0].get_submodule("up").register_forward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.up.*cannot run"):
        sp_compiler.compile(model, tp=1)
    model = net()
    model.blocks[1].get_submodule("norm").register_full_backward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.norm.*_backward_hooks"):
        sp_compiler.compile(model, tp=1)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.up"):
        module.blocks[0].up.register_forward_pre_hook(lambda *args: None)
    late = compiled()
    late.blocks[0].down.register_full_backward_hook(lambda *args: None)
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.down"):
        late(batch())


def test_hooks_of_parameters_that_exist_before() -> None:
    """One rank keeps the parameters themselves, and so their hooks."""
    model, seen = net(), []
    model.head.weight.register_hook(lambda grad: seen.append(grad))
    module = sp_compiler.compile(model, tp=1)
    module(batch())["loss"].backward()
    assert len(seen) == 1


def test_the_first_call_may_be_watched() -> None:
    """Torch's counter of FLOPs hooks all modules and sees every operator, but none of a capture."""
    counts = []
    for one in (net(), compiled(net, recompute="none")):
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                one(batch())["loss"].backward()
            counts.append(counter.get_total_flops())
    assert counts == [counts[0]] * 4
    assert counts[0] > 0


def test_a_hook_on_all_modules_is_refused() -> None:
    module = compiled(net)
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(UnsupportedError, match=r"register_module_forward_hook\) cannot run"):
            module(batch())
    finally:
        handle.remove()
    module(batch())
