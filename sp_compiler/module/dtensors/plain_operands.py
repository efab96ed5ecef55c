"""Plain tensors together with DTensors in one operation.

DTensor refuses them. Here a plain tensor means the same full tensor on every rank, as for inputs of
a compiled module and next to its outputs, so that ``weight.mul_(mask)``, ``weight[3] = row``,
``(weight - before).norm()`` and ``F.mse_loss(weight, before)`` have the same results as on one
device. A write runs on full tensors, of which every rank keeps its part; a plain tensor that is
read is replicated, and sharded where needed. The same holds for the zeros and ones of the full size
that autograd makes in the backward of ``prod`` and others.

An error is raised where results would differ from those on one device: for a plain operand that
requires a gradient, whose gradient would be a DTensor, and for tensors on axes whose ranks have
different data.

``weight.data = value`` silently does nothing to a DTensor. Here it replaces the values.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, SPCompilerError, UnsupportedError
from sp_compiler.module.dtensors.gathered_views import (
    GatheredView,
    full_value,
    has_groups,
    settle_sums,
    write_whole,
)
from sp_compiler.runtime.mesh_axes import TENSOR_AXIS

_WHAT_TO_DO = (
    "what to do: compute with parameter.full_tensor(), which all ranks must call and through which "
    "gradients flow, or make the operand a DTensor: torch.distributed.tensor.distribute_tensor("
    "value, parameter.device_mesh, parameter.placements)"
)
# Writes of which optimizers make thousands, and for which a handler in Python would take as long as
# the operation.
_OFTEN = ("add_", "mul_", "lerp_", "addcmul_", "addcdiv_", "__iadd__", "__imul__")
# It has no rule before torch 2.13, and nothing to do below autograd.
_MISSING: dict[Any, Any] = {torch.ops.aten.detach_.default: lambda operation, args, kwargs: args[0]}


class _Dispatcher(OpDispatcher):
    """DTensor's dispatcher, whose handlers can be disabled for one thread."""

    @property
    def _custom_op_handlers(self) -> dict[Any, Any]:  # type: ignore[override]
        return _MISSING if _this_thread.needs_no_handler else vars(self)["_custom_op_handlers"]

    def _propagate_op_sharding_dispatch_slow_path(
        self, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
    ) -> Any:
        """Propagate, with two fallbacks: an operation without a rule, or with data-dependent
        shapes, runs on full tensors; a write into pending sums runs after they are reduced."""
        propagate = super()._propagate_op_sharding_dispatch_slow_path
        try:
            return propagate(op_call, args, kwargs, op_info, try_cache)
        except (NotImplementedError, RuntimeError) as error:
            if op_call._schema.is_mutable and settle_sums(op_call, args, kwargs):
                return op_call(*args, **kwargs)
            lacks_rule = isinstance(error, NotImplementedError)
            depends = isinstance(error.__cause__, DynamicOutputShapeException)
            changes = op_call._schema.is_mutable or op_call.is_view
            # Ranks may draw different numbers, which would be taken for one replicated tensor.
            draws = torch.Tag.nondeterministic_seeded in op_call.tags
            refused = changes or draws or torch.compiler.is_compiling()
            refused = refused or not has_groups(op_info.compute_mesh)
            if refused or not (lacks_rule or depends):
                raise
            full_args, full_kwargs = pytree.tree_map(full_value, (tuple(args), dict(kwargs)))
            result = op_call(*full_args, **full_kwargs)
            return pytree.tree_map(
                functools.partial(_replicated, mesh=op_info.compute_mesh), result
            )


class _Thread(threading.local):
    needs_no_handler = False


_this_thread = _Thread()


@functools.cache
def take_plain_operands() -> None:
    """Let operations on DTensors take plain tensors, for the process."""
    DTensor._op_dispatcher.__class__ = _Dispatcher
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(_MISSING)
    reads, writes, composites = _kinds()
    for operation in reads:
        handlers[operation] = functools.partial(_read, handlers.get(operation))
    for operation in writes:
        handlers.setdefault(operation, _write)
    for operation in composites:
        handlers.setdefault(operation, _as_dtensor_does)
    for method in _OFTEN:
        setattr(DTensor, method, _past_handlers(method))
    # The gradient of ``weight[rows]``.
    handlers[torch.ops.aten.index_put.default] = _put
    DTensor.data = property(DTensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]


def _past_handlers(method: str) -> Callable[..., Any]:
    """Return ``DTensor.method`` that skips handlers if all tensors are DTensors."""
    as_before = getattr(DTensor, method)

    @functools.wraps(as_before)
    def run(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        # A gathered view is of another class, and is written to by other operations.
        tensors = [x for x in (self, *args, *kwargs.values()) if isinstance(x, Tensor)]
        if all(type(x) is DTensor for x in tensors):
            return _without_handler(as_before, self, *args, **kwargs)
        return as_before(self, *args, **kwargs)

    return run


def _kinds() -> tuple[list[Any], list[Any], list[Any]]:
    """Return the operations that read several tensors, those that write results computed from other
    tensors into one or several, and composite operations."""
    reads, writes, composites = [], [], []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten":
            continue
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if _is_composite(operation):
            composites.append(operation)
        schema = operation._schema
        operands = [str(each.type) for each in schema.arguments if "Tensor" in str(each.type)]
        # Other operations return a result and also write internal state, such as running means.
        in_place = packet.endswith("_") and schema.is_mutable
        if in_place or any(each.is_out for each in schema.arguments):
            # Operations with this tag change the shape or the storage of a tensor.
            if len(operands) > 1 and torch.Tag.inplace_view not in operation.tags:
                writes.append(operation)
        elif not schema.is_mutable and (len(operands) > 1 or "List[Tensor]" in operands):
            reads.append(operation)
    return reads, writes, composites


def _write(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` on full tensors if a plain one is among them, else as DTensor does."""
    tensors = list(_tensors(args, kwargs))
    plain = [x for x in tensors if _is_plain(x)]
    # A plain 0-dim tensor is not in ``plain``, but may be written to: total.copy_(weight.sum()).
    into_plain = isinstance(args[0], Tensor) and not isinstance(args[0], DTensor)
    if not plain and not into_plain:
        return _as_dtensor_does(operation, args, kwargs)
    _refuse_gradients(operation, plain)
    if into_plain and torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, DTensor) and x.requires_grad:
                raise UnsupportedError(
                    f"{operation} writes a DTensor that requires a gradient, of shape "
                    f"{tuple(x.shape)}, into a plain tensor: what to do: total = total + value "
                    "instead of total += value, or value.full_tensor(), which all ranks must call "
                    "and through which gradients flow; value.detach() if none should flow"
                )
    try:
        return write_whole(operation, args, kwargs)
    except (SPCompilerError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        parts = [x for x in tensors if isinstance(x, DTensor)]
        for operand, x in itertools.product(plain, parts):
            if operand.shape == x.to_local().shape != x.shape:
                raise ArgumentError(
                    f"{operation}: a plain tensor next to a parameter means the same full tensor "
                    f"on every rank; got shape {tuple(operand.shape)}, that of this rank's part of "
                    f"a DTensor of shape {tuple(x.shape)}, expected a shape that broadcasts to the "
                    "full one. parameter.to_local() is this rank's part as a plain tensor"
                ) from error
        raise


def _read(handler: Any, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` by its other ``handler``, if any, or as DTensor does, with plain tensors
    replicated."""
    mesh = _mesh_of_read(operation, args, kwargs)
    if mesh is not None:
        replicated = functools.partial(_replicated, mesh=mesh)
        args, kwargs = pytree.tree_map(replicated, (tuple(args), dict(kwargs)))
    return (handler or _as_dtensor_does)(operation, args, kwargs)


def _put(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``index_put`` on full tensors if a plain one or a mask is among them, else as DTensor
    does."""
    mesh = _mesh_of_read(operation, args, kwargs)
    if mesh is None:
        if not any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1]):
            return _as_dtensor_does(operation, args, kwargs)
        # DTensor would use the full mask on each part.
        mesh = next(x.device_mesh for x in _tensors(args, kwargs) if isinstance(x, DTensor))
    args, kwargs = pytree.tree_map(full_value, (tuple(args), dict(kwargs)))
    return _replicated(operation(*args, **kwargs), mesh)


def _mesh_of_read(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeviceMesh | None:
    """Return the mesh over which to replicate plain tensors among the arguments; ``None`` if there
    are none."""
    tensors = list(_tensors(args, kwargs))
    plain = [x for x in tensors if _is_plain(x)]
    if not plain:
        return None
    _refuse_gradients(operation, plain)
    mesh: DeviceMesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    if mesh.ndim > 1 or mesh.mesh_dim_names not in (None, (TENSOR_AXIS,)):
        raise UnsupportedError(
            f"{operation} of a plain tensor of shape {tuple(plain[0].shape)} and a DTensor over "
            f"{mesh}, whose ranks may have different data: {_WHAT_TO_DO}"
        )
    return mesh


def _as_dtensor_does(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if _is_composite(operation):
        # Only in inference mode. DTensor would run some on each part as if it were the full one.
        return operation.decompose(*args, **kwargs)
    # Without handlers, since DTensor would call the handler again.
    return _without_handler(operation, *args, **kwargs)


def _without_handler(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = _this_thread.needs_no_handler
    _this_thread.needs_no_handler = True
    try:
        return operation(*args, **kwargs)
    finally:
        _this_thread.needs_no_handler = before


@functools.cache
def _is_composite(operation: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(operation.has_kernel_for_dispatch_key(key))


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    # By hand, in a fifth of pytree's time; lists are not nested.
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, Tensor):
                yield x


def _is_plain(x: Any) -> bool:
    # DTensor accepts 0-dim tensors.
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.ndim > 0


def _replicated(x: Any, mesh: DeviceMesh) -> Any:
    if not _is_plain(x):
        return x
    meta = TensorMeta(x.shape, x.stride(), x.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
    return DTensor(x.detach(), spec, requires_grad=False)


def _refuse_gradients(operation: Any, plain: Sequence[Tensor]) -> None:
    for operand in plain:
        if operand.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{operation} of a DTensor and a plain tensor of shape {tuple(operand.shape)} that "
                f"requires a gradient, which would become a DTensor: {_WHAT_TO_DO}"
            )


def _set_data(self: DTensor, value: Tensor) -> None:
    """Replace the data of ``self``, as on one device: the old ``self.data`` does not change, so
    that ``before = p.data; p.data = averaged; ...; p.data = before`` restores the values."""
    same = value.shape == self.shape and value.dtype == self.dtype
    if not same or value.device.type != self.device.type:
        raise UnsupportedError(
            f"data of a DTensor of shape {tuple(self.shape)}, {self.dtype} on {self.device}: "
            f"expected a value like it, got {tuple(value.shape)}, {value.dtype} on {value.device}; "
            "module.to(...) changes the dtype or the device of a module's parameters"
        )
    with torch.no_grad():
        part = _part_like(self, value.detach())
    if part.is_set_to(self._local_tensor):  # of ``p.data += 1``
        return
    if isinstance(self, GatheredView) or self.device_mesh.mesh_dim_names != (TENSOR_AXIS,):
        # FSDP, for example, gathers from its own memory, not from the DTensor.
        raise UnsupportedError(
            f"the data of a DTensor over {self.device_mesh} cannot be set, because its memory is "
            "also used elsewhere: write the values instead, parameter.data.copy_(values)"
        )
    self._local_tensor = part
    # The backward of an earlier forward would read the new values: it raises, as after any write.
    if not self.is_inference():
        torch.autograd.graph.increment_version(self)


def _part_like(x: DTensor, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``: its own memory if ``value`` is placed like ``x``."""
    if isinstance(value, DTensor) and value.placements == x.placements:
        part = value._local_tensor
        if value.device_mesh == x.device_mesh and part.stride() == x._local_tensor.stride():
            return part
    # Not a view of a full tensor, whose memory other parts share.
    copied: Any = x.detach().clone()
    copied.copy_(value)
    local: Tensor = copied._local_tensor
    return local
