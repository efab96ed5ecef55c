"""Training and evaluation, grad modes, autocast and dtypes, through the public API."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import sp_compiler
from sp_compiler import UnsupportedError
from sp_compiler.runtime.recorder import Recorder
from tests.helpers.users import (
    assert_same_gradients,
    batch,
    compiled,
    gradients,
    net,
    num_compiled,
    prepared,
)


def test_dropout_is_off_in_eval_and_on_in_training() -> None:
    module, model = prepared(0.5), net(0.5).eval()
    training = [module(batch())["loss"].item() for _ in range(2)]
    module.eval()
    evaluated = [module(batch())["loss"] for _ in range(2)]
    assert training[0] != training[1]
    torch.testing.assert_close(evaluated, [model(batch())["loss"]] * 2, rtol=1e-12, atol=0)
    assert num_compiled(module) == 2
    module.train()
    torch.manual_seed(2)
    again = module(batch())["loss"].item()
    torch.manual_seed(2)
    assert module(batch())["loss"].item() == again
    assert num_compiled(module) == 2


def test_train_and_eval_programs_share_parameters() -> None:
    module = prepared(0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.eval()
    before = module(batch())["loss"].item()
    module.train()
    for _ in range(20):
        optimizer.zero_grad()
        module(batch())["loss"].backward()
        optimizer.step()
    module.eval()
    assert module(batch())["loss"].item() < before


def test_dropout_of_one_submodule_can_be_switched_off() -> None:
    module = prepared(0.5)
    module(batch())
    for layer in module.blocks:
        layer.dropout.eval()
    losses = [module(batch())["loss"] for _ in range(2)]
    torch.testing.assert_close(losses, [net()(batch())["loss"]] * 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(mode: type) -> None:
    module = prepared()
    x = batch()
    with mode():
        module(x)
        with Recorder() as recorder:
            output = module(x)
    kept = recorder.alive_bytes(excluding=[x, *module.parameters(), *output.values()])
    assert kept == 0
    assert not any(value.requires_grad for value in output.values())
    assert output["loss"].is_inference() is (mode is torch.inference_mode)
    with Recorder() as recorder:
        output = module(x)
    assert recorder.alive_bytes(excluding=[x, *module.parameters(), *output.values()]) > 0
    assert num_compiled(module) == 1


def test_training_goes_on_after_a_first_call_in_inference_mode() -> None:
    module, model = compiled(), net()
    with torch.inference_mode():
        module(batch())
    module(batch())["loss"].backward()
    model(batch())["loss"].backward()
    assert_same_gradients(module, model)


@torch.inference_mode()
def _fixed(layer: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


class Teacher(nn.Module):
    """Learns what another layer, in inference mode, computes."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            target = self.teacher(x)
            with torch.inference_mode(False):
                bias = self.student.bias * 2
        return (self.student(x) - target.clone() * _fixed(self.teacher, x).clone() + bias).square()


def test_inference_mode_inside_of_the_model() -> None:
    eager = Teacher().double()
    module = compiled(lambda: copy.deepcopy(eager))
    for each in (module, eager):
        each(batch()).mean().backward()
    torch.testing.assert_close(module(batch()), eager(batch()), rtol=1e-12, atol=0)
    assert set(gradients(module)) == {"student.weight", "student.bias"}
    assert_same_gradients(module, eager)


def test_autocast_is_that_of_eager() -> None:
    module, model = (m.float() for m in (compiled(), net()))
    x = batch(dtype=torch.float32)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            actual, true = module(x), model(x)
        assert {key: value.dtype for key, value in actual.items()} == {
            key: value.dtype for key, value in true.items()
        }
        torch.testing.assert_close(actual, true)
        module.zero_grad()
        model.zero_grad()
        actual["loss"].backward()
        true["loss"].backward()
        tolerance = 1e-2 if enabled else 1e-5
        torch.testing.assert_close(
            gradients(module), gradients(model), rtol=tolerance, atol=tolerance
        )
    assert num_compiled(module) == 2


def test_autocast_inside_of_the_model() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.linear(x)

    torch.manual_seed(0)
    model = Casting()
    module = compiled(lambda: Casting())
    module.load_state_dict(model.state_dict())
    x = batch(dtype=torch.float32)
    out = module(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out, model(x))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float32, 1e-5), (torch.float64, 1e-10)]
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    module, model = compiled(lambda: net(dtype=dtype)), net(dtype=dtype)
    x = batch(dtype=dtype)
    actual, true = module(x), model(x)
    actual["loss"].backward()
    true["loss"].backward()
    assert actual["loss"].dtype is dtype
    torch.testing.assert_close(actual, true, rtol=tolerance, atol=tolerance)
    assert all(p.grad.dtype is dtype for p in module.parameters())
    assert_same_gradients(module, model, tolerance)


def test_moving_to_another_dtype_between_calls() -> None:
    module = prepared()
    module.to(torch.bfloat16)
    out = module(batch(dtype=torch.bfloat16))
    assert out["loss"].dtype is torch.bfloat16
    assert num_compiled(module) == 2


def test_grad_scaler() -> None:
    module, model = prepared(), net()
    for one in (module, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(one(batch())["loss"]).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
    torch.testing.assert_close(
        dict(module.state_dict()), dict(model.state_dict()), rtol=1e-10, atol=0
    )


def test_two_runs_are_bitwise_equal() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(11)
        module = compiled(lambda: net(0.3))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch())["loss"].backward()
            optimizer.step()
        return [parameter.detach() for parameter in module.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_transforms_are_refused() -> None:
    """They would fail deep inside, or see constants."""
    module, x = prepared(), batch()

    def loss(x: Tensor) -> Tensor:
        y: Tensor = module(x)["loss"]
        return y

    for transform in (torch.func.grad(loss), torch.func.vmap(loss), torch.func.jacrev(loss)):
        with pytest.raises(UnsupportedError, match=r"use loss\.backward\(\)"):
            transform(x)
    with pytest.raises(UnsupportedError, match="original model"):
        torch.func.jvp(loss, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        assert loss(x).item() == loss(x.clone()).item()  # no dual number among the inputs
        with pytest.raises(UnsupportedError, match="forward-mode AD"):
            loss(torch.autograd.forward_ad.make_dual(x, x))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="use the original model"):
        grad.sum().backward()


def test_batches_of_gradients_are_refused() -> None:
    """An operator without a rule for batches would raise torch's error, which names no reason."""
    module, x = prepared(), batch().requires_grad_()
    rows = module(x)["rows"]
    every = torch.eye(rows.numel(), dtype=rows.dtype).view(-1, *rows.shape)

    def grad(of_rows: Tensor) -> Tensor:
        return torch.autograd.grad(rows, x, of_rows, retain_graph=True)[0]

    jacobian = functools.partial(torch.autograd.functional.jacobian, lambda x: module(x)["rows"])
    for call in (
        lambda: torch.autograd.grad(rows, x, every, is_grads_batched=True, retain_graph=True),
        lambda: torch.vmap(grad)(every),
        lambda: jacobian(x, vectorize=True),
    ):
        with pytest.raises(UnsupportedError, match="loop over the gradients"):
            call()
    found = torch.stack([grad(one) for one in every])
    torch.testing.assert_close(found, jacobian(x).view_as(found))


class Masked(nn.Module):
    """Causal attention by a mask, and a position added, both made on the device of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        x = x + torch.arange(length, device=x.device)[:, None]
        heads = self.linear(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def test_a_default_device_is_that_of_the_models_tensors_alone() -> None:
    """As of a script that sets it to "cuda": what the compiler computes with stays on the CPU."""
    eager = Masked()
    module = compiled(lambda: copy.deepcopy(eager))
    inputs = [torch.randn(2, length, 8, dtype=torch.float64) for length in (5, 6, 7)]
    with torch.device("meta"):
        for x in inputs:
            for one in (eager, module):
                one(x).sum().backward()
            assert_same_gradients(module, eager)
        assert sp_compiler.verify(eager, ((inputs[0],), {}), tp=2).ok
    assert num_compiled(module) == 2


class Scaled(nn.Module):
    """Makes a number in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.full((8,), 0.1)


def test_each_default_dtype_has_a_program() -> None:
    eager = Scaled()
    module = compiled(lambda: copy.deepcopy(eager))
    x = torch.randn(2, 8, dtype=torch.float64)
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            torch.testing.assert_close(module(x), eager(x), rtol=1e-12, atol=0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert num_compiled(module) == 2
