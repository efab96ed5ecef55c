"""Autograd behaviour of a compiled program: what users do with the outputs of a module."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.base.placement import I, S
from sp_compiler.compiler import Compilation
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from sp_compiler.options import CompileOptions
from sp_compiler.runtime.executor import Executor
from sp_compiler.runtime.reductions import DeferredGradients, reduce_gradients
from sp_compiler.runtime.region_call import RegionRunner
from sp_compiler.verification.judge import unit_tangent
from sp_compiler.verification.simulate import gather_check, scatter, simulated_ranks
from tests.helpers.parity import compiled, make_case
from tests.helpers.slow import slow
from tests.models import zoo
from tests.models.handmade import BlockCode, Model, handmade


def _model() -> Any:
    torch.manual_seed(0)
    return Model().double()


def _input(requires_grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_(requires_grad)


def _run(model: Model, x: Tensor) -> dict[str, Tensor]:
    executor = Executor(handmade(1), Communicator(None, 0, 1))
    loss, last = executor.run(
        dict(model.named_parameters()), dict(model.named_buffers()), [x]
    ).outputs
    return {"loss": loss, "last": last}


def _grads(outputs: list[Tensor], model: Model) -> list[Tensor]:
    return list(torch.autograd.grad(outputs, list(model.parameters())))


def _close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)


def test_several_forwards_before_one_backward() -> None:
    model, x = _model(), _input()
    first, second = _run(model, x), _run(model, 2 * x)
    actual = _grads([first["loss"] + second["loss"]], model)
    _close(actual, _grads([model(x)["loss"] + model(2 * x)["loss"]], model))


def test_what_one_program_put_off_another_reduces() -> None:
    """Norms: read as R where tokens are sharded, and else in full, as another size may be."""
    found = make_case(zoo.build("lora", layers=1).requires_grad_(), zoo.inputs("lora"))
    options = CompileOptions(tp=2, sequence_parallel=False)
    first = compiled(found, tp=2)
    placements = first.param_placements
    other = Compilation(found.program, options, fixed=placements).finish(options)
    deferred = DeferredGradients()
    with simulated_ranks(2) as tp:
        params = {
            name: scatter(value, placements[name], 2).requires_grad_()
            for name, value in found.params.items()
        }
        inputs = [scatter(value, I, 2) for value in found.inputs]
        for program in (first, other):
            deferred.enabled = program is first
            (loss,) = Executor(program, tp, deferred=deferred).run(params, {}, inputs).outputs
            loss.backward(unit_tangent(loss))
        assert not deferred.pending
        for name, true in found.grads.items():
            assert true is not None
            grad = params[name].grad
            assert grad is not None
            torch.testing.assert_close(gather_check(grad, placements[name]), 2 * true)


@pytest.mark.parametrize("name", ["loss", "last"])
def test_an_unused_output_costs_nothing(name: str) -> None:
    model, x = _model(), _input()
    _close(_grads([_run(model, x)[name].sum()], model), _grads([model(x)[name].sum()], model))


def test_retain_graph_and_accumulation() -> None:
    model, x = _model(), _input()
    loss = _run(model, x)["loss"]
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()
    _close([parameter.grad for parameter in model.parameters()], [2 * grad for grad in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradient_of_a_subset() -> None:
    model, x = _model(), _input(requires_grad=True)
    weight = model.blocks[1].up.weight
    actual = torch.autograd.grad(_run(model, x)["loss"], [weight, x])
    _close(actual, torch.autograd.grad(model(x)["loss"], [weight, x]))


def test_double_backward_raises_only_when_it_is_taken() -> None:
    model, x = _model(), _input()
    (grad,) = torch.autograd.grad(
        _run(model, x)["loss"], [model.blocks[0].scale], create_graph=True
    )
    with pytest.raises(UnsupportedError, match="gradient of a gradient"):
        grad.sum().backward()


def test_frozen_parameters_get_no_gradient() -> None:
    model, x = _model(), _input()
    model.blocks[0].requires_grad_(False)
    _run(model, x)["loss"].backward()
    assert all(parameter.grad is None for parameter in model.blocks[0].parameters())
    assert all(parameter.grad is not None for parameter in model.blocks[1].parameters())


def test_change_in_place_between_forward_and_backward_raises() -> None:
    model, x = _model(), _input()
    loss = _run(model, x)["loss"]
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _ViewCode:
    """Square of each element; what is saved is a view of the input."""

    @staticmethod
    def forward(tp: Any, x: Tensor) -> Any:
        flat = x.view(-1)
        return (flat * flat,), (flat,)

    @staticmethod
    def backward(tp: Any, saved: Any, grad: Tensor) -> Any:
        grad_x = (2 * saved[0] * grad).view(4, 4)
        assert grad_x._base is None  # what backward makes is not even recorded as a view
        return (grad_x,)


def test_a_view_that_is_saved_is_watched() -> None:
    code: Any = _ViewCode
    runner = RegionRunner(code, (True,), Communicator(None, 0, 1))
    x = _input(requires_grad=True)
    (out,) = runner([x], [])
    out.sum().backward()
    _close(x.grad, 2 * x.detach())
    (out,) = runner([x], [])
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        out.sum().backward()


def _alive() -> int:
    gc.collect()
    return sum(
        1 for item in gc.get_objects() if type(item) is Tensor and item.dtype is torch.float64
    )


@pytest.mark.parametrize("mode", [slow(torch.no_grad), torch.inference_mode])
def test_nothing_is_kept_without_gradients(mode: Any) -> None:
    model, x = _model(), _input()
    before = _alive()
    with mode():
        out = _run(model, x)
    assert not out["loss"].requires_grad
    assert _alive() == before + 2


def test_autocast_does_not_reach_the_generated_code() -> None:
    model, x = _model().float(), _input().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = _run(model, x)
    assert out["last"].dtype is torch.float32
    _close(out["loss"], model(x)["loss"])


def test_outer_checkpoint() -> None:
    model, x = _model(), _input(requires_grad=True)
    checkpoint(lambda value: _run(model, value)["loss"], x, use_reentrant=False).backward()
    (expected,) = torch.autograd.grad(
        model(x.detach().requires_grad_())["loss"], [model.blocks[0].scale]
    )
    _close(model.blocks[0].scale.grad, expected)


def test_an_output_that_is_given_twice() -> None:
    class Twice:
        @staticmethod
        def forward(tp: Any, *inputs: Tensor) -> Any:
            (out,), saved = BlockCode.forward(tp, *inputs)
            return (out, out), saved

        @staticmethod
        def backward(tp: Any, saved: Any, first: Tensor, second: Tensor) -> Any:
            return BlockCode.backward(tp, saved, first + 3 * second)

    compiled = handmade(1, layers=1)
    region = compiled.program.calls[1].region
    region.output_placements = (S(0), S(0))
    compiled.codes["Block"] = Twice()
    compiled.differentiable["Block"] = (True, True)
    torch.manual_seed(0)
    model: Any = Model(layers=1).double()
    run = Executor(compiled, Communicator(None, 0, 1)).run(
        dict(model.named_parameters()), dict(model.named_buffers()), [_input()]
    )
    run.outputs[1].sum().backward()
    _close(model.blocks[0].scale.grad, _grads([model(_input())["last"].sum()], model)[0])


def test_gradients_are_reduced_in_one_bucket_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [torch.ones(2, 3), None, torch.ones(4).bfloat16(), torch.full((2,), 2.0)]
    with simulated_ranks(2) as tp:
        local = [None if grad is None else scatter(grad, I, 2) for grad in grads]
        calls: list[int] = []
        original = tp.all_reduce

        def counted(x: Tensor, src: str, dst: str) -> Tensor:
            calls.append(x.numel())
            return original(x, src, dst)

        monkeypatch.setattr(tp, "all_reduce", counted)
        reduced = reduce_gradients(tp, local)
        assert calls == [8, 4]
        assert reduced[1] is None
        for grad, result in zip(grads, reduced, strict=True):
            if grad is not None and result is not None:
                assert torch.equal(gather_check(result, I), 2 * grad)


def test_reduced_gradients_have_no_graph() -> None:
    """Also with create_graph, whose second backward is refused."""
    full = torch.ones(3)
    with simulated_ranks(2) as tp:
        (reduced,) = reduce_gradients(tp, [scatter(full, I, 2).requires_grad_()])
    assert reduced is not None
    assert not reduced.requires_grad


def test_wrong_placement_or_world_is_refused() -> None:
    compiled = handmade(2)
    with pytest.raises(ArgumentError, match="compiled for 2 ranks"):
        Executor(compiled, Communicator(None, 0, 1))
    compiled.param_placements["blocks.0.up.weight"] = S(1)
    with simulated_ranks(2) as tp, pytest.raises(ArgumentError, match=r"blocks\.0\.up\.weight"):
        Executor(compiled, tp)
    with pytest.raises(ArgumentError, match="no code for region 'Block'"):
        CompiledProgram(compiled.program, {"Enter": BlockCode()}, {}, 2, {"Enter": (True, False)})
