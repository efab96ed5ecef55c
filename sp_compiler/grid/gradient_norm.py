"""The norm of all gradients together, sharded over any axes of a mesh.

::

    this rank's parts ──> one number for each set of axes over which parts are sharded
                          (q.weight: dp_shard, tp   norm.weight: dp_shard   table: none)
                      ──> one all-reduce for each axis, of the numbers of the sets that have it
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from sp_compiler.base.errors import ArgumentError
from sp_compiler.grid.watched_group import watched
from sp_compiler.runtime.parameter_gradients import local_tensor
from sp_compiler.runtime.reductions import refuse_pending

_Axis = tuple[int, ...]
"""The ranks of one process group: meshes that are concatenated differently share axes."""


class HasParameters(Protocol):
    """A module or a pipeline.

    A pipeline has two more attributes: ``pp_group``, the process group of the axis "pp", and
    ``counted_elsewhere``, the parameters that another stage also has and counts.
    """

    def parameters(self) -> Iterator[Any]: ...


@torch.no_grad()
def clip_grad_norm_(
    module: HasParameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients in place so that their norm over the grid is at most ``max_norm``.

    Replaces ``torch.nn.utils.clip_grad_norm_``, which fails if gradients are on several meshes. All
    parts of a sharded parameter count; a replicated or tied one counts once. Every rank must call
    it.

    Args:
        module: a module, compiled or not, or a pipeline.
        max_norm: largest norm of all gradients together.
        norm_type: p of the p-norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: raise an error if the norm is infinite or NaN. The host then has to
            wait for the norm.
        foreach: compute the norms of many tensors in one kernel; ``None``: if the device has such a
            kernel.

    Returns:
        The norm before clipping, a 0-dim tensor, the same on all ranks.

    Raises:
        ArgumentError: ``module`` has no ``parameters()``, ``max_norm`` is negative, or
            ``norm_type`` is not positive.
        UnsupportedError: gradients computed under ``no_sync`` are not reduced yet, so the norm
            would miss them.
        RuntimeError: with ``error_if_nonfinite``, the norm is infinite or NaN.
    """
    max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
    # Before the first collective, so that all ranks raise the error and none waits.
    _check(module, max_norm, norm_type)
    refuse_pending("clip_grad_norm_()", module.parameters())
    elsewhere = {id(parameter) for parameter in getattr(module, "counted_elsewhere", ())}
    grads, counted = [], []
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = _summed(parameter.grad)
            grads.append(parameter.grad)
            # Counted on one stage only, but scaled on all that have it.
            if id(parameter) not in elsewhere:
                counted.append(grads[-1])
    total = _total_norm(counted, norm_type, foreach, getattr(module, "pp_group", None))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so it cannot "
            "be clipped. To scale by it anyway, pass error_if_nonfinite=False"
        )
    # Without reading the total, which would make the host wait for the device.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parts in _by_kind([local_tensor(grad) for grad in grads]):
        factor = scale.to(parts[0].device)
        if _has_foreach(parts[0], foreach):
            torch._foreach_mul_(parts, factor)
        else:
            for part in parts:
                part.mul_(factor)
    return total


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}={value!r}: expected a number") from None


def _check(module: Any, max_norm: float, norm_type: float) -> None:
    if not callable(getattr(module, "parameters", None)):
        raise ArgumentError(
            f"module={type(module).__name__}: expected the module (or pipeline) itself, "
            "clip_grad_norm_(module, max_norm), not its parameters, because only the pipeline "
            "knows which of them another stage counts"
        )
    if not norm_type > 0:
        raise ArgumentError(f"norm_type={norm_type}: expected a positive number or inf")
    if not max_norm >= 0:
        raise ArgumentError(f"max_norm={max_norm}: expected 0 or more")


def _total_norm(
    grads: Sequence[Tensor], p: float, foreach: bool | None, pp_group: dist.ProcessGroup | None
) -> Tensor:
    groups: dict[_Axis, dist.ProcessGroup] = {}
    by_axes: dict[frozenset[_Axis], list[Tensor]] = {}
    for grad in grads:
        axes = sharded_over(grad)
        groups.update(axes)
        by_axes.setdefault(frozenset(axes), []).append(local_tensor(grad))
    device = communication_device(grads)
    powers = [_sum_of_powers(parts, p, foreach).to(device) for parts in by_axes.values()]
    dtype = max((power.dtype for power in powers), default=torch.float32, key=lambda t: t.itemsize)
    keys, numbers = list(by_axes), torch.zeros(len(powers), dtype=dtype, device=device)
    for index, power in enumerate(powers):
        numbers[index] = power
    # In the order of the parameters, which is the same on all ranks of an axis.
    for axis, group in groups.items():
        chosen = [index for index, key in enumerate(keys) if axis in key]
        numbers[chosen] = _all_reduced(numbers[chosen], p, group)
    total = (numbers.amax() if math.isinf(p) else numbers.sum()) if keys else numbers.sum()
    if pp_group is not None and dist.get_world_size(pp_group) > 1:
        # In float64, as stages may differ in dtype; a stage without gradients takes part too.
        total = _all_reduced(total.double(), p, pp_group)
    return total if math.isinf(p) else total.pow(1.0 / p)


def _sum_of_powers(parts: list[Tensor], p: float, foreach: bool | None) -> Tensor:
    """Return the largest element, or the sum of p-th powers of norms, in float32 or higher
    precision."""
    norms: list[Tensor] = []
    for same in _by_kind([part for part in parts if part.numel()]):
        dtype = torch.promote_types(same[0].dtype, torch.float32)
        if _has_foreach(same[0], foreach):
            norms += torch._foreach_norm(same, p, dtype=dtype)
        else:
            norms += [torch.linalg.vector_norm(part, p, dtype=dtype) for part in same]
    if not norms:  # shards of this rank may all be empty
        kind = torch.promote_types(parts[0].dtype, torch.float32)
        return torch.zeros((), dtype=kind, device=parts[0].device)
    # If gradients are on several devices, on the first one.
    stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
    return stacked.amax() if math.isinf(p) else stacked.pow(p).sum()


def _summed(grad: Tensor) -> Tensor:
    """Return ``grad`` with partial sums reduced, because their norms cannot be added."""
    if not isinstance(grad, DTensor) or not any(where.is_partial() for where in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if where.is_partial() else where for where in grad.placements]
    )


def sharded_over(grad: Tensor) -> dict[_Axis, dist.ProcessGroup]:
    """Return the axes with several ranks over which ``grad`` is sharded."""
    if not isinstance(grad, DTensor):
        return {}
    mesh = grad.device_mesh
    groups = [mesh.get_group(i) for i, w in enumerate(grad.placements) if not w.is_replicate()]
    return {
        tuple(dist.get_process_group_ranks(group)): group
        for group in groups
        if dist.get_world_size(group) > 1
    }


def communication_device(grads: Iterable[Tensor]) -> torch.device:
    """Return the device for collectives; gradients that FSDP offloads are on another device."""
    for grad in grads:
        local = local_tensor(grad)
        kind = grad.device_mesh.device_type if isinstance(grad, DTensor) else local.device.type
        return local.device if local.device.type == kind else torch.device(kind)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator if accelerator is not None else torch.device("cpu")


def _by_kind(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return lists of tensors of one device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds.values()


def _has_foreach(tensor: Tensor, foreach: bool | None) -> bool:
    # On the CPU foreach is a loop; on no device does it take integers or sparse tensors.
    return tensor.device.type != "cpu" if foreach is None else foreach


def _all_reduced(numbers: Tensor, p: float, group: dist.ProcessGroup) -> Tensor:
    """Return sums over the ranks, or maxima for the norm of order inf; NaN if any rank has NaN."""
    if not math.isinf(p):
        dist.all_reduce(numbers, dist.ReduceOp.SUM, group=watched(group))
        return numbers
    # Nothing is larger than NaN, so whether a maximum keeps it depends on the order of ranks.
    nan = numbers.isnan()
    sent = torch.stack([numbers.masked_fill(nan, 0.0), nan.to(numbers.dtype)])
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=watched(group))
    return sent[0].masked_fill(sent[1] > 0, math.nan)
