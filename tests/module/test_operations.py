"""Losses, convolutions and maxima of sharded tensors: those of one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.torch_version import TorchVersion

from sp_compiler.module.dtensors.gathered_views import write_through_views
from sp_compiler.module.dtensors.losses import divide_by_all_elements, divide_by_all_labels
from sp_compiler.module.dtensors.patches import (
    convolve_whole_dims,
    count_dims_from_front,
    divide_by_whole_sums,
    fill_pending_sums,
    reduce_all_dims,
)
from sp_compiler.module.dtensors.plain_operands import take_plain_operands
from sp_compiler.module.dtensors.segmented_shard import segmented_shard
from sp_compiler.module.outputs import ShardedOutput
from tests.helpers.ranks import run_on_ranks
from tests.helpers.two_ranks import full

_LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "smooth_l1": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
    "huber": lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.5),
    "soft_margin": lambda x, y, reduction: F.soft_margin_loss(x, y.sign(), reduction=reduction),
    "cross_entropy": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), reduction=reduction
    ),
    "weighted": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), weight=y.abs(), reduction=reduction
    ),
    "l1": F.l1_loss,
}
_PLACES: dict[str, Callable[[], Any]] = {
    "rows": lambda: Shard(0),
    "columns": lambda: Shard(1),  # of which the ranks have 3 and 2
    "segments": lambda: segmented_shard(0, (4, 2)),
    "replicated": Replicate,
}
_REDUCTIONS = ("mean", "sum")
_START = torch.linspace(-2, 2, 30, dtype=torch.float64).view(6, 5)
_TARGET = torch.linspace(-1, 3, 30, dtype=torch.float64).view(5, 6).t()


def _gradient(loss: Callable[..., Tensor], x: Tensor, target: Tensor, reduction: str) -> Tensor:
    x.requires_grad_()
    (3 * loss(x, target, reduction=reduction)).backward()
    assert x.grad is not None
    return full(x.grad)


def _gradients() -> dict[tuple[str, ...], Tensor]:
    """By loss, placement, kind of tensor and reduction."""
    divide_by_all_elements()
    mesh = init_device_mesh("cpu", (2,))
    result: dict[tuple[str, ...], Tensor] = {}
    for name, loss in _LOSSES.items():
        for where, placement in _PLACES.items():
            # A sum counts no elements: that of uneven parts, and of whole tensors.
            for reduction in _REDUCTIONS if where in ("columns", "replicated") else ("mean",):
                x = distribute_tensor(_START.clone(), mesh, [placement()])
                target = distribute_tensor(_TARGET, mesh, [Replicate()])
                result[name, where, "parameter", reduction] = _gradient(loss, x, target, reduction)
            if where in ("rows", "columns"):  # as outputs are
                x = distribute_tensor(_START.clone(), mesh, [placement()])
                x.__class__ = ShardedOutput
                result[name, where, "output", "mean"] = _gradient(loss, x, _TARGET, "mean")
    return result


_IMAGES = torch.linspace(-1, 1, 480, dtype=torch.float64).sin().view(2, 4, 10, 6)
_KERNEL = torch.linspace(-1, 2, 144, dtype=torch.float64).cos().view(4, 4, 3, 3)
_CONVOLUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: F.conv2d(x, _KERNEL),
    "of points": lambda x: F.conv2d(x, _KERNEL[..., :1, :1]),
    "padded": lambda x: F.conv2d(x, _KERNEL, padding="same"),
    "by steps": lambda x: F.conv2d(x, _KERNEL, _KERNEL[0, 0, 0, 0].expand(4), stride=2, padding=1),
    "transposed": lambda x: F.conv_transpose2d(x, _KERNEL, stride=2),
    "of sequences": lambda x: F.conv1d(x.flatten(2), _KERNEL[..., 0], padding=1),
    "of rows": lambda x: F.conv1d(x.flatten(0, 1), _KERNEL[0, 0, 0].expand(10, 1, 3), groups=10),
}


_HAS_POOLS = torch.__version__ >= TorchVersion("2.12")
_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a batch": lambda x: F.adaptive_avg_pool2d(x, 3),
    "an image": lambda x: F.adaptive_avg_pool2d(x[0], (3, 4)),
}


def _convolved(convolution: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """(result, gradient); ``x`` as an output, which belongs to a graph."""
    x.requires_grad_()
    output = x.view_as(x)
    if isinstance(x, DTensor):
        output.__class__ = ShardedOutput
    result = convolution(output)
    whole = result.full_tensor() if isinstance(result, DTensor) else result
    whole.square().sum().backward()
    assert x.grad is not None
    return whole.detach(), full(x.grad)


def _gradient_through(pool: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x.requires_grad_()
    pool(x).square().sum().backward()
    assert x.grad is not None
    return full(x.grad)


def _of_sharded_images(
    measure: Callable[..., Any], functions: Mapping[str, Callable[[Tensor], Tensor]]
) -> dict[tuple[str, int], Any]:
    """``measure(function, images)`` by name of the function and sharded dim."""
    convolve_whole_dims()
    mesh = init_device_mesh("cpu", (2,))
    return {
        (name, dim): measure(function, distribute_tensor(_IMAGES.clone(), mesh, [Shard(dim)]))
        for name, function in functions.items()
        for dim in range(4)
    }


_WITH_TIES = torch.tensor([[-3.0, 1], [3, 3], [-3, 0], [3, -3]], dtype=torch.float64)
_EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(),
    "norm": lambda x: x.norm(math.inf),
    "amax of a few": lambda x: x[:2].amax(),
    "amax along a dim": lambda x: x.amax(0, keepdim=True),
}


def _extremes() -> dict[tuple[str, int], Tensor]:
    """Gradients by function and sharded dim."""
    divide_by_whole_sums()
    reduce_all_dims()
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for name, extreme in _EXTREMES.items():
        for dim in range(2):
            x = distribute_tensor(_WITH_TIES.clone(), mesh, [Shard(dim)]).requires_grad_()
            extreme(x).sum().backward()
            result[name, dim] = x.grad.full_tensor()
    return result


_LIKE = torch.linspace(3, -1, 30, dtype=torch.float64).view(6, 5).cos()
_LABELS = torch.tensor([0, 1, 3, 1, 2, 2])
# Those of whose backward DTensor has no rule for an operation, or no zeros or ones; those along a
# dim or all of them; those that make something of a pending sum.
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda x: F.mse_loss(x, _LIKE),
    "huber": lambda x: F.huber_loss(x, _LIKE, delta=0.5),
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x, _LIKE.abs(), _LIKE.abs()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), _LIKE.softmax(-1), reduction="batchmean"),
    "cosine": lambda x: F.cosine_similarity(x, _LIKE, 0),
    "cosines": lambda x: F.cosine_embedding_loss(x, _LIKE, _LIKE[:, 0].sign(), margin=0.1),
    "poisson": lambda x: F.poisson_nll_loss(x, 2 + _LIKE, full=True),
    "logsigmoid": lambda x: F.multilabel_soft_margin_loss(x, _LIKE.abs().round()),
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(-1),
    "cummax": lambda x: x.cummax(1).values,
    "median": lambda x: x.median(0).values,
    "quantile": lambda x: x.quantile(0.3),
    "quantile of columns": lambda x: x.quantile(0.3, 0),
    "kthvalue": lambda x: torch.stack([x, -x]).kthvalue(1, 0).values,
    "mode": lambda x: x.round().mode(1).values + x[:, 0],
    "mean": lambda x: x.mean(()),
    "mean that keeps dims": lambda x: x.mean((), keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=()),
    "deviation": lambda x: x.std(()).detach() + x.nansum(()),
    "product": lambda x: x @ _LIKE.t(),
    # Rows of which the ranks have 3 and 2, and 3 each; some are not counted, and not alike.
    "labels of columns": lambda x: F.cross_entropy(x.t(), _LABELS[1:], ignore_index=1),
    "labels of rows": lambda x: F.cross_entropy(x, _LABELS, _LIKE[0].abs()),
    "labels of one rank": lambda x: F.nll_loss(x.t(), _LABELS[1:], ignore_index=2),
    "labels of pixels": lambda x: F.cross_entropy(x.view(1, 6, 5), _LABELS[None, 1:] % 2),
    "column from the end": lambda x: x.select(-1, 1),
    "row from the end": lambda x: x.select(-2, 1),
    "columns from the end": lambda x: x.narrow(-1, 1, 3) * x[:, 1:4],
    "trapezoid": torch.trapezoid,
    "sum of norms of rows": lambda x: x.norm(dim=1).sum(),
    "sum of norms of columns": lambda x: torch.linalg.vector_norm(x, 3, 0, keepdim=True).sum(
        (0, 1)
    ),
    "rows with any": lambda x: x.sum(1) * (x > 1).any(1).to(x.dtype),
    "columns with any": lambda x: x.sum(0) * (x > 1).any(0).to(x.dtype),
    "filled": lambda x: x.sum(1) + x.detach().sum(1).fill_(3),
    "a written column": lambda x: _written(x, (slice(None), 0), 3.0),
    "written rows": lambda x: _written(x, torch.tensor([0, 3]), 3.0),
    "a written mask": lambda x: _written(x, _LIKE > 0, 3.0),
}


# DTensor of torch 2.11 has no rules for views of segments, and refuses to write into pending sums.
_CUT = ["columns"]
if torch.__version__ >= TorchVersion("2.12"):
    _CUT += ["segments"]
    _FUNCTIONS["squares"] = lambda x: x.sum(1) + x.detach().norm(dim=1).square_().clamp_(max=3)


def _written(x: Tensor, where: Any, value: float) -> Tensor:
    copied = x.clone()
    copied[where] = value
    return copied


def _value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x.requires_grad_()
    result = function(x)
    size = result.shape
    whole = result.full_tensor() if isinstance(result, DTensor) else result
    assert whole.shape == size
    whole.square().sum().backward()
    assert x.grad is not None
    return whole.detach(), full(x.grad)


def _functions() -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """By function and placement or kind of tensor."""
    for install in (
        *(count_dims_from_front, divide_by_all_labels, fill_pending_sums, reduce_all_dims),
        *(write_through_views, take_plain_operands),
    ):
        install()
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for name, function in _FUNCTIONS.items():
        for where in _CUT:
            x = distribute_tensor(_START.clone(), mesh, [_PLACES[where]()])
            result[name, where] = _value_and_gradient(function, x)
        x = distribute_tensor(_START.clone(), mesh, [Shard(1)])
        x.__class__ = ShardedOutput
        result[name, "output"] = _value_and_gradient(function, x)
    # Which torch flattens only in the first dim.
    heads = distribute_tensor(_START.clone(), mesh, [segmented_shard(1, (5,), units=5)])
    assert torch.equal(full(heads.flatten()), _START.flatten())
    # Without a rule either, but each rank would draw its own.
    with pytest.raises(NotImplementedError, match=r"aten\.poisson"):
        torch.poisson(distribute_tensor(_LIKE.abs(), mesh, [Shard(1)]))
    return result


def _all() -> tuple[Any, ...]:
    convolutions = _of_sharded_images(_convolved, _CONVOLUTIONS)
    pools = _of_sharded_images(_gradient_through, _POOLS) if _HAS_POOLS else {}
    return _gradients(), convolutions, _extremes(), pools, _functions()


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_on_ranks(2, _all)


@pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"), reason="DTensor raises an error for some of them"
)
@pytest.mark.parametrize("name", _LOSSES)
def test_gradients_are_those_of_one_device(ranks: Any, name: str) -> None:
    """The mean is over the elements of all ranks: of one rank's, gradients are twice too large."""
    expected = {
        reduction: _gradient(_LOSSES[name], _START.clone(), _TARGET, reduction)
        for reduction in _REDUCTIONS
    }
    for gradients, *_ in ranks:
        for key, gradient in gradients.items():
            if key[0] == name:
                error = (gradient - expected[key[-1]]).abs().max().item()
                assert error < 1e-15, key


@pytest.mark.parametrize("name", _CONVOLUTIONS)
def test_a_convolution_is_that_of_one_device(ranks: Any, name: str) -> None:
    """Along a sharded dim, it was that of each rank's part, and half as large."""
    expected = _convolved(_CONVOLUTIONS[name], _IMAGES.clone())
    for _, convolutions, *_ in ranks:
        for dim in range(4):
            torch.testing.assert_close(convolutions[name, dim], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not _HAS_POOLS, reason="DTensor raises an error")
@pytest.mark.parametrize("name", _POOLS)
def test_a_pool_of_a_parameter_has_the_gradient_of_one_device(ranks: Any, name: str) -> None:
    """Of an image without a batch it was wrong."""
    expected = _gradient_through(_POOLS[name], _IMAGES.clone())
    for *_, pools, _ in ranks:
        for dim in range(4):
            torch.testing.assert_close(pools[name, dim], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", _EXTREMES)
def test_elements_that_share_a_maximum_share_its_gradient(ranks: Any, name: str) -> None:
    """Autograd counts them, and the count was that of each rank."""
    x = _WITH_TIES.clone().requires_grad_()
    _EXTREMES[name](x).sum().backward()
    for *_, gradients, _, _ in ranks:
        for dim in range(2):
            torch.testing.assert_close(gradients[name, dim], x.grad, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_a_function_and_its_gradient_are_those_of_one_device(ranks: Any, name: str) -> None:
    """Of parameters and outputs, beside plain tensors."""
    expected = _value_and_gradient(_FUNCTIONS[name], _START.clone())
    for *_, functions in ranks:
        for where in (*_CUT, "output"):
            torch.testing.assert_close(functions[name, where], expected, rtol=1e-12, atol=1e-13)


# Functions whose result is small, and of which the sum over all elements, or the square of the
# norm, is more than float16 holds.
_NARROW: dict[str, Callable[[Tensor], Tensor]] = {
    "mse": lambda x: F.mse_loss(x, -x.detach()),
    "huber": lambda x: F.huber_loss(x, -x.detach()),
    "norm": lambda x: x.norm(),
    "norms": lambda x: x.norm(3, dim=1).amax(),
}


def _narrow_start() -> Tensor:
    return torch.linspace(1, 30, 2048).view(8, 256).half()


def _narrow() -> dict[str, tuple[Tensor, Tensor]]:
    """Results and gradients by function."""
    divide_by_all_elements()
    reduce_all_dims()
    take_plain_operands()
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for name, function in _NARROW.items():
        x = distribute_tensor(_narrow_start(), mesh, [Shard(1)]).requires_grad_()
        value = function(x)
        # Loss scaling, with which a gradient of the sum would overflow too.
        (value * 4096).backward()
        result[name] = full(value.detach()), full(x.grad)
    return result


def test_what_fits_float16_does_not_overflow_on_the_way() -> None:
    for actual in run_on_ranks(2, _narrow):
        for name, function in _NARROW.items():
            x = _narrow_start().requires_grad_()
            value = function(x)
            (value * 4096).backward()
            assert value.isfinite()
            assert x.grad is not None
            torch.testing.assert_close(actual[name], (value.detach(), x.grad), rtol=5e-3, atol=0)


def test_what_is_sharded_alike_needs_no_collective(mesh: Any) -> None:
    divide_by_all_elements()
    x = distribute_tensor(_START.clone(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    target = distribute_tensor(_TARGET, mesh, [Shard(0)], src_data_rank=None)
    loss = F.mse_loss(x, target)
    with CommDebugMode() as communication:
        loss.backward()
    assert communication.get_total_counts() == 0
