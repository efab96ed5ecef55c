"""Gradients of distributed parameters arrive as autograd would bring them, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import sp_compiler
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.runtime.parameter_gradients import deliver, local_tensor, parameter_edges
from tests.helpers import users
from tests.helpers.slow import slow


def _one_of_two(test: Any) -> Any:
    """A test of one rank of two, whose models use all-reduces alone.

    The missing rank's reduce-scatter leaves memory as it was found on some versions of torch.
    """
    replicated = pytest.mark.filterwarnings("ignore:costly parts of the model are replicated")
    return pytest.mark.usefixtures("mesh")(replicated(test))


class _Sum(torch.autograd.Function):
    """Sum of the local parts of parameters; its gradients of all of them are one tensor."""

    @staticmethod
    def forward(ctx: Any, scale: float, *parameters: Tensor) -> Tensor:
        ctx.scale, ctx.parameters = scale, parameter_edges((scale, *parameters))
        ctx.shape, ctx.count = local_tensor(parameters[0]).shape, len(parameters)
        total = sum(local_tensor(parameter).sum() for parameter in parameters)
        return torch.as_tensor(total).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        own = (grad * ctx.scale).expand(ctx.shape).contiguous()
        results: list[Tensor | None] = [None, *[own] * ctx.count]
        deliver(ctx.parameters, ctx.next_functions, results, (grad,))
        return tuple(results)


def _parameters(mesh: DeviceMesh | None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, generator=generator) for _ in range(2)]
    if mesh is None:
        return [nn.Parameter(part) for part in parts]
    return [nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)])) for part in parts]


def _loss(*parameters: Tensor) -> Tensor:
    # Thirds: the order of a sum of three shows in its bits.
    uses = [_Sum.apply(scale / 3, *parameters) for scale in (0.1, 7.3, 1e4)]
    return torch.stack(uses).sum()


def _once(first: Tensor, second: Tensor) -> None:
    _loss(first, second).backward()


def _accumulated(first: Tensor, second: Tensor) -> None:
    for _ in range(3):
        _loss(first, second).backward()
        second.grad = None


def _zeroed_in_place(first: Tensor, second: Tensor) -> None:
    _loss(first, second).backward()
    torch.optim.SGD([first, second]).zero_grad(set_to_none=False)
    _loss(first, second).backward()


def _hooks(first: Tensor, second: Tensor) -> None:
    first.register_hook(lambda grad: grad * 2)

    def triple(parameter: Any) -> None:
        parameter.grad.mul_(3)

    second.register_post_accumulate_grad_hook(triple)
    _loss(first, second).backward()


def _of_one(first: Tensor, second: Tensor) -> None:
    _loss(first, second).backward(inputs=[second])


def _frozen_since(first: Tensor, second: Tensor) -> None:
    loss = _loss(first, second)
    second.requires_grad_(False)
    loss.backward()
    assert second.grad is None
    second.grad = torch.zeros_like(second)


def _returned(first: Tensor, second: Tensor) -> None:
    grads = torch.autograd.grad(_loss(first, second), [first, second])
    assert first.grad is None
    assert second.grad is None
    first.grad, second.grad = grads


def _with_a_use_of_autograds_own(first: Tensor, second: Tensor) -> None:
    part = first.to_local() if isinstance(first, DTensor) else first
    (_loss(first, second) + part.square().sum()).backward()


@pytest.mark.parametrize(
    "use",
    [
        _once,
        _accumulated,
        _zeroed_in_place,
        _hooks,
        _of_one,
        _frozen_since,
        _returned,
        _with_a_use_of_autograds_own,
    ],
)
def test_as_of_plain_parameters(use: Callable[..., None], mesh: DeviceMesh) -> None:
    plain, distributed = _parameters(None), _parameters(mesh)
    use(*plain)
    use(*distributed)
    for expected, actual in zip(plain, distributed, strict=True):
        if expected.grad is None:
            assert actual.grad is None
        else:
            assert isinstance(actual.grad, DTensor)
            assert actual.grad.placements == (Shard(0),)
            assert torch.equal(local_tensor(actual.grad), expected.grad)


def test_no_two_gradients_share_memory(mesh: DeviceMesh) -> None:
    first, second = _parameters(mesh)
    _Sum.apply(1.0, first, second).backward()
    assert second.grad is not None
    before = local_tensor(second.grad).clone()
    assert first.grad is not None
    first.grad.zero_()
    assert torch.equal(local_tensor(second.grad), before)


class _Halves(_Sum):
    """Its gradients are the two halves of one tensor, in either order."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        halves = grad.expand(2 * ctx.shape[0], *ctx.shape[1:]).contiguous().chunk(2)
        results: list[Tensor | None] = [None, *(halves if ctx.scale > 0 else halves[::-1])]
        deliver(ctx.parameters, ctx.next_functions, results, (grad,))
        return tuple(results)


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_parts_of_one_gradient_are_not_copied(mesh: DeviceMesh, scale: float) -> None:
    parameters = _parameters(mesh)
    _Halves.apply(scale, *parameters).backward()
    first, second = (local_tensor(parameter.grad) for parameter in parameters)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_overlapping_gradients_of_other_inputs_are_copied() -> None:
    whole = torch.arange(6.0)
    first, overlapping, behind = whole[:4], whole[3:], whole[4:]
    results: list[Tensor | None] = [None, first, overlapping, behind, whole.to_sparse()]
    deliver([], [], results, (None,))
    assert results[1] is first
    assert results[3] is behind
    assert results[2] is not None
    assert torch.equal(results[2], overlapping)
    assert results[2].untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_a_sparse_gradient_of_another_input_stays(mesh: DeviceMesh) -> None:
    parameter, sparse = _parameters(mesh)[0], torch.eye(2).to_sparse()
    results: list[Tensor | None] = [torch.ones(2, 3), sparse]
    deliver(parameter_edges([parameter]), [(None, 0)], results, (None,))
    assert isinstance(results[0], DTensor)
    assert results[1] is sparse


def test_one_that_is_added_to_counts_it(mesh: DeviceMesh) -> None:
    """Autograd finds that a gradient is not any more what somebody saved for backward."""
    first, second = _parameters(mesh)
    seen: list[Tensor] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if first.grad is not None:
                seen.append(first.grad)
                seen.append(torch.tensor(first.grad._version))
            return grad

    torch.stack([Look.apply(_Sum.apply(1.0, first, second)) for _ in range(3)]).sum().backward()
    assert len(seen) == 4
    assert seen[0] is seen[2]
    assert seen[3] > seen[1]


def _parts(module: Any) -> dict[str, Tensor]:
    return {
        name: local_tensor(parameter.grad).clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


@_one_of_two
def test_no_sync_defers_only_what_a_backward_fills() -> None:
    module, x = users.compiled(tp=2, sequence_parallel=False), users.batch()
    module(x)["loss"].backward()
    expected = _parts(module)
    module.zero_grad()
    with module.no_sync():
        module(x)["loss"].backward(inputs=[module.head.weight])
    module(x)["loss"].backward()
    for name, part in _parts(module).items():
        times = 2 if name == "head.weight" else 1
        torch.testing.assert_close(part, times * expected[name], rtol=1e-12, atol=1e-12)


@_one_of_two
def test_what_waits_since_no_sync_is_not_returned() -> None:
    module, x = users.compiled(tp=2, sequence_parallel=False), users.batch()
    weight = module.head.weight
    module(x)["loss"].backward()
    expected = local_tensor(weight.grad).clone()
    module.zero_grad()
    with module.no_sync():
        module(x)["loss"].backward()
        with pytest.raises(UnsupportedError, match=r"autograd\.grad inside of no_sync"):
            torch.autograd.grad(module(x)["loss"], list(module.parameters()), allow_unused=True)
    (grad,) = torch.autograd.grad(module(x)["loss"], [weight])
    torch.testing.assert_close(local_tensor(grad), expected, rtol=1e-12, atol=1e-12)
    module(x)["loss"].backward()
    torch.testing.assert_close(local_tensor(weight.grad), 2 * expected, rtol=1e-12, atol=1e-12)


@_one_of_two
@pytest.mark.parametrize("set_to_none", [True, slow(False)])
def test_zero_grad_drops_what_waits_since_no_sync(set_to_none: bool) -> None:
    module, x = users.compiled(tp=2, sequence_parallel=False), users.batch()
    module(x)["loss"].backward()
    expected = _parts(module)
    with module.no_sync():
        module(x)["loss"].backward()
    module.zero_grad(set_to_none)
    module(x)["loss"].backward()
    for name, part in _parts(module).items():
        assert torch.equal(part, expected[name])


@_one_of_two
def test_zero_grad_of_a_part_drops_what_waits_for_it() -> None:
    module, x = users.compiled(tp=2, sequence_parallel=False), users.batch()
    module(x)["loss"].backward()
    expected = _parts(module)
    module.zero_grad()
    with module.no_sync():
        module(x)["loss"].backward()
    module.blocks[0].zero_grad()
    module(x)["loss"].backward()
    for name, part in _parts(module).items():
        times = 1 if name.startswith("blocks.0.") else 2
        torch.testing.assert_close(part, times * expected[name], rtol=1e-12, atol=1e-12)


@_one_of_two
def test_nothing_is_clipped_while_gradients_wait() -> None:
    module, x = users.compiled(tp=2, sequence_parallel=False), users.batch()
    with module.no_sync():
        module(x)["loss"].backward()
    with pytest.raises(UnsupportedError, match=r"clip_grad_norm_\(\) while .* deferred by no_sync"):
        sp_compiler.clip_grad_norm_(module, 1.0)
    module(x)["loss"].backward()
    sp_compiler.clip_grad_norm_(module, 1.0)


@_one_of_two
def test_a_copy_has_no_gradients() -> None:
    """Neither those in ``grad``, as of plain parameters, nor what waits since ``no_sync``."""
    module, x = users.compiled(tp=2, sequence_parallel=False), users.batch()
    module(x)["loss"].backward()
    expected = _parts(module)
    with module.no_sync():
        module(x)["loss"].backward()
    twin = copy.deepcopy(module)
    assert not _parts(twin)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin(x)["loss"].backward()
    for name, part in _parts(twin).items():
        assert torch.equal(part, expected[name])
    assert module.head.weight.grad is not None


class _Views(nn.Module):
    """Sum whose terms get views of one gradient, two of them by one autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(16))
        self.grid = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y.view(4, 4) + self.row.view(4, 4) + self.grid.t()


def test_inputs_with_views_of_one_gradient_accumulate_apart() -> None:
    module = users.compiled(_Views)
    x, y = torch.ones(4, 4, requires_grad=True), torch.ones(16, requires_grad=True)
    weights = torch.arange(16.0)
    for _ in range(3):
        (module(x, y).view(16) * weights).sum().backward()
    for grad in (x.grad, y.grad, module.row.grad, module.grid.grad.t()):
        assert torch.equal(grad.reshape(16), 3 * weights)
