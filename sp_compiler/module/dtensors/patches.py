"""Patches of PyTorch's DTensor for an ordinary training loop.

A fused optimizer step is one elementwise kernel over lists of parameters, gradients and moments.
DTensor derives the placement of each of them at every step, which takes longer than the step of a
small model, and refuses lists with several meshes. Here the kernel runs on the local parts, which
is the same if a parameter's gradient and moments have its placement.

``cumsum``, ``cumprod`` and ``logcumsumexp`` over a sharded dim that is counted from the end, as in
``probabilities.cumsum(-1)``, scan only each rank's part: torch compares the dim with that of the
placement, which is counted from the front.

The gradients of ``select`` and ``narrow`` (also in ``diff`` and ``trapezoid``) along a dim that is
counted from the end are placed as if on another dim: they belong to other elements, or some ranks
raise errors.

A convolution along a sharded dim of an image or sequence convolves only this rank's part, and its
result has the size of the part's; the gradient of ``adaptive_avg_pool2d`` of an image without a
batch is wrong. Here the dim is gathered.

``sum(dim=(), keepdim=True)``, a sum over all dims, sums only each rank's part, and so do
``mean(())`` and others. Autograd uses it to count the elements that share the maximum of
``weight.amax()`` or ``weight.norm(math.inf)``, by whose number it divides; on torch 2.11 each part
counts only its own.

``weight.norm(dim=1).sum()`` along a sharded dim adds up the norms of each rank's part, and takes
the norm of these sums; ``mask.any(1).to(dtype)`` counts the ranks that have one. Here pending norms
are reduced before they are summed, and ``any`` is reduced immediately. ``weight.norm()`` of a
float16 weight is infinite if the norm of a part is more than 256: here norms of 16-bit tensors are
reduced in float32.

``fill_`` of a pending sum, as in the ones of ``F.cosine_embedding_loss``, fills the summand of
every rank, so that the sum is too large by the number of ranks.

``weight.normal_()`` of a sharded weight draws the part of each rank from that rank's own generator:
with equal seeds, on a CPU, all parts are equal. Here the full tensor is drawn, as without sharding,
and every rank keeps its part.

``if mask.any()`` and ``weight.sum().item()`` read the summand of this rank if the sum over the
ranks is pending. ``torch.allclose`` is missing.

``torch.nn.utils.clip_grad_norm_`` returns a DTensor, for which ``f"{norm:.3f}"`` is a TypeError.

``torch.save`` silently writes the part of one rank.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import _pointwise_ops
from torch.distributed.tensor.experimental import register_sharding
from torch.torch_version import TorchVersion

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ir.fx import named_arguments
from sp_compiler.module.dtensors.gathered_views import (
    by_rule_or_whole,
    full_value,
    handle,
    overloads_of,
    run_past_handlers,
    write_through_views,
    write_whole,
)
from sp_compiler.module.dtensors.losses import divide_by_all_elements, divide_by_all_labels
from sp_compiler.module.dtensors.overflows import find_overflows_of_all_ranks
from sp_compiler.module.dtensors.plain_operands import take_plain_operands

_FUSED_STEPS = tuple(
    getattr(packet, overload)
    for packet in (
        getattr(torch.ops.aten, f"_fused_{name}_") for name in ("adam", "adamw", "sgd", "adagrad")
    )
    for overload in ("default", "tensor_lr")  # the learning rate is a number or a tensor
    if overload in packet.overloads()
)
_SCANS = [getattr(torch.ops.aten, n).default for n in ("cumsum", "cumprod", "logcumsumexp")]
_DRAWN = tuple(
    getattr(torch.ops.aten, name)
    for name in (
        *("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "geometric_"),
        *("log_normal_", "random_", "rand_like", "randn_like", "randint_like", "bernoulli"),
    )
)
_CONVOLUTIONS = (
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
)
_POOLS = (
    torch.ops.aten._adaptive_avg_pool2d.default,
    torch.ops.aten._adaptive_avg_pool2d_backward.default,
)
_GRADIENTS_OF_PARTS = (
    torch.ops.aten.select_backward.default,
    torch.ops.aten.slice_backward.default,
)
_ANY = overloads_of([torch.ops.aten.any])
_NORM = torch.ops.aten.linalg_vector_norm.default
# Reductions for which an empty list of dims means all dims.
_OVER_ALL_DIMS = tuple(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        *(("sum", "default"), ("sum", "dim_IntList"), ("mean", "dim"), ("nansum", "default")),
        *((name, "correction") for name in ("var", "std", "var_mean", "std_mean")),
        *(("linalg_vector_norm", "default"), ("count_nonzero", "dim_IntList")),
    )
)


def patch_dtensors() -> None:
    """Install all patches of DTensor, for the process; a second call does nothing."""
    convolve_whole_dims()
    count_dims_from_front()
    divide_by_all_elements()
    divide_by_all_labels()
    divide_by_whole_sums()
    draw_whole_tensors()
    fill_pending_sums()
    find_overflows_of_all_ranks()
    format_as_numbers()
    read_true_numbers()
    scan_whole_dims()
    step_local_parts()
    reduce_all_dims()
    take_plain_operands()
    write_through_views()


@functools.cache
def step_local_parts() -> None:
    """Make fused optimizers step on the local parts of DTensors, for the process."""
    handle(_FUSED_STEPS, _step_local_parts)


@functools.cache
def draw_whole_tensors() -> None:
    """Make operations that fill a DTensor with random numbers draw the full tensor."""
    handle(overloads_of(_DRAWN), _draw_whole)


@functools.cache
def read_true_numbers() -> None:
    """Make ``bool``, ``int``, ``float``, ``item()`` and ``torch.allclose`` of a DTensor read the
    full tensor, for the process."""
    handle(
        [torch.ops.aten._local_scalar_dense.default, torch.ops.aten.allclose.default], _read_number
    )


@functools.cache
def count_dims_from_front() -> None:
    """Count the dim from the front in gradients of ``select`` and ``slice``, for the process."""
    handle(_GRADIENTS_OF_PARTS, _place_part)


@functools.cache
def convolve_whole_dims() -> None:
    """Make convolutions and pooling gather the dims along which they run, for the process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operation in _CONVOLUTIONS:
        handlers[operation] = functools.partial(_convolve, handlers[operation])
    handle(_POOLS, _pool)


@functools.cache
def reduce_all_dims() -> None:
    """Make reductions over an empty list of dims reduce all dims, reduce pending norms before they
    are reduced further, and ``any`` immediately, for the process."""
    handle(_OVER_ALL_DIMS, _reduce)
    handle(_ANY, _reduce_now)


@functools.cache
def fill_pending_sums() -> None:
    """Make ``fill_`` of a DTensor with pending sums fill the sum, for the process."""
    handle([torch.ops.aten.fill_.Scalar], _fill)


@functools.cache
def divide_by_whole_sums() -> None:
    """Make a division by a pending sum reduce the sum first, for the process.

    Torch 2.11 treats the quotient of a replicated number and a pending sum as a pending sum.
    """
    if TorchVersion(torch.__version__) < "2.12":
        for operation in (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor):
            # Later versions have no such table.
            _pointwise_ops.linear_pointwise_ops.pop(operation, None)  # type: ignore[attr-defined]


@functools.cache
def format_as_numbers() -> None:
    """Make a 0-dim DTensor format as a number, like a plain tensor."""
    # torch internals: DTensor inherits Tensor.__format__, which formats only plain tensors.
    as_before = DTensor.__format__

    def format_number(self: DTensor, spec: str) -> str:
        # Without a spec it prints as before: only calls that raised an error change.
        if spec and self.dim() == 0 and not self.is_meta:
            return format(self.item(), spec)
        return as_before(self, spec)

    DTensor.__format__ = format_number  # type: ignore[method-assign, assignment]


@functools.cache
def scan_whole_dims() -> None:
    """Make scans gather the dim along which they run, however it is counted, for the process."""

    @register_sharding(_SCANS)
    def _scan(x: Any, dim: int, **_: Any) -> list[tuple[list[Any], list[Any]]]:
        others = [Shard(other) for other in range(x.ndim) if other != dim % x.ndim]
        return [([where], [where, None]) for where in (Replicate(), *others)]


def _convolve(
    handler: Any, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> object:
    # Batch and channels may be sharded.
    whole = [_whole_from(x, 2) if isinstance(x, DTensor) else x for x in args]
    return handler(operation, tuple(whole), kwargs)


def _pool(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    # The batch may be missing, but DTensor assumes that the first two dims are batch and channels.
    whole = [_whole_from(x, x.ndim - 2) if isinstance(x, DTensor) else x for x in args]
    result, _ = run_past_handlers(operation, whole, kwargs)
    return result


def _whole_from(x: DTensor, dim: int) -> DTensor:
    """Return ``x`` with ``dim`` and all later dims unsharded."""
    # Strided shards have a dim too, but are not instances of Shard.
    places = [Replicate() if getattr(p, "dim", -1) >= dim else p for p in x.placements]
    if places == list(x.placements):
        return x
    return cast(DTensor, x.detach()).redistribute(placements=places)  # detached as in full_value


@torch.no_grad()
def _step_local_parts(
    operation: Any, args: Sequence[Sequence[Tensor]], kwargs: Mapping[str, Any]
) -> None:
    """Run ``operation(parameters, gradients, moments, ..., state_steps)`` on this rank's parts."""
    names = [argument.name for argument in operation._schema.arguments]
    lists = [
        # A list of moments that the optimizer does not use is empty.
        [_part_for_step(name, x, like) for x, like in zip(tensors, args[0], strict=bool(tensors))]
        for name, tensors in zip(names, args, strict=False)
    ]
    # Learning rate, scale of gradients, and whether one is infinite: the same on every rank.
    numbers = {name: full_value(value) for name, value in kwargs.items()}
    operation(*lists, **numbers)
    # Writes into local parts do not increment the version of DTensors, of which views may exist.
    torch.autograd.graph.increment_version(args[0])


def _part_for_step(name: str, x: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of ``x``, an element of the list ``name``, that belongs to this rank's part
    of ``parameter``.

    Raises:
        UnsupportedError: ``x`` has another placement and must be written in place.
    """
    if name == "state_steps":
        return cast("Tensor", full_value(x))
    if not isinstance(x, DTensor) and not isinstance(parameter, DTensor):
        return x
    if isinstance(x, DTensor) and isinstance(parameter, DTensor):
        same_mesh = x.device_mesh == parameter.device_mesh
        if same_mesh and x.placements == parameter.placements:
            return x.to_local()
        if same_mesh and name == "grads":
            # It may come from a hook, for example. The step only reads it, and then it is freed.
            return x.redistribute(placements=parameter.placements).to_local()
    raise UnsupportedError(
        f"fused optimizer step: {name!r} of a parameter of shape {tuple(parameter.shape)} is "
        f"{_where(x)}, the parameter {_where(parameter)}; expected the same. Load state of an "
        "earlier run with optimizer.load_state_dict, which places it like its parameter; "
        "fused=False supports any placement"
    )


def _draw_whole(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Run ``operation(x, ...)`` on full tensors, and return or keep this rank's part."""
    if operation._schema.is_mutable:
        return cast("Tensor", write_whole(operation, args, kwargs))
    x = args[0]
    others = {name: full_value(value) for name, value in kwargs.items()}
    drawn = operation(*map(full_value, args), **others)
    # Rank 0's on all ranks, since their generators may have different states.
    return distribute_tensor(drawn, x.device_mesh).redistribute(placements=x.placements)


def _read_number(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return operation(*map(full_value, args), **kwargs)


def _place_part(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    grad, sizes, dim, *rest = args
    result, _ = run_past_handlers(operation, (grad, sizes, dim % len(sizes), *rest), kwargs)
    return result


def _reduce(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = named_arguments(operation, args, kwargs)
    if any(hasattr(where, "norm_type") for where in given["self"].placements):
        given["self"] = _without_pending(given["self"])
    if given.get("dim") == []:
        given["dim"] = list(range(given["self"].ndim))
    # Else norms of parts would overflow in float16 when they are squared, to be added up.
    is_narrow = operation is _NORM and given["dtype"] is None and given["self"].itemsize == 2
    result_dtype = given["self"].dtype
    if is_narrow:
        given["dtype"] = torch.float32
    positional = [a.name for a in operation._schema.arguments if not a.kwarg_only]
    values = [given.pop(name) for name in positional if name in given]
    result = by_rule_or_whole(operation, values, given)
    return _without_pending(result).to(result_dtype) if is_narrow else result


def _reduce_now(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    return _without_pending(by_rule_or_whole(operation, args, kwargs))


def _without_pending(x: DTensor) -> DTensor:
    """Return ``x`` with pending reductions done."""
    places = [Replicate() if p.is_partial() else p for p in x.placements]
    return cast(DTensor, x.detach()).redistribute(placements=places)  # detached as in full_value


def _fill(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x = args[0]
    places = tuple(Replicate() if p.is_partial() else p for p in x.placements)
    if places != x.placements:
        x._spec = DTensorSpec(x.device_mesh, places, x._spec.tensor_meta)
    run_past_handlers(operation, args, kwargs)
    return x


def _where(x: Tensor) -> str:
    return f"placed {x.placements} on {x.device_mesh}" if isinstance(x, DTensor) else "a plain one"


def refuse_to_pickle(value: DTensor) -> None:
    """Make pickling of a sharded ``value`` an error: a file of rank 0 would have only a part of
    it."""
    if any(not where.is_replicate() for where in value.placements):
        # On the object, not on its class: copies, also by checkpoint libraries, can be pickled.
        value.__reduce_ex__ = _raise_partial  # type: ignore[method-assign]


def _raise_partial(protocol: Any) -> NoReturn:
    raise UnsupportedError(
        "a sharded DTensor cannot be pickled (torch.save): the file would have only this rank's "
        "part. Unsharded weights: state = module.full_state_dict() on all ranks, then save it on "
        "rank 0. Sharded checkpoints, also of optimizers: torch.distributed.checkpoint.save on "
        "all ranks"
    )
