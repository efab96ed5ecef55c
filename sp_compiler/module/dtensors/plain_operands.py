"""Plain tensors beside DTensors in one operation.

DTensor refuses them. Here a plain tensor means, as for inputs of a compiled module and beside its
outputs, the same full tensor on every rank, so that ``weight.mul_(mask)``, ``weight[3] = row`` and
``(weight - before).norm()`` do what they do on one device. A write runs on full tensors, of which
every rank keeps its part; what is read is cut into the parts where it is needed.

What would not be that of one device raises: a plain operand that wants a gradient, which would get
a DTensor as its gradient, and tensors on axes whose ranks have data of their own.

``weight.data = value`` changes a DTensor in nothing, without a word. Here it replaces the numbers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, SPCompilerError, UnsupportedError
from sp_compiler.module.dtensors.gathered_views import GatheredView, full_value, write_whole
from sp_compiler.runtime.mesh_axes import AXIS

_WHAT_TO_DO = (
    "what to do: compute with parameter.full_tensor(), which all ranks must call and through which "
    "gradients flow, or make the operand a DTensor: torch.distributed.tensor.distribute_tensor("
    "value, parameter.device_mesh, parameter.placements)"
)
# What a user compares and combines weights with. Products and others remain DTensor's errors.
_READS = (
    *("add", "sub", "mul", "div", "maximum", "minimum", "where", "masked_fill"),
    *("index", "index_select"),
    *("eq", "ne", "lt", "le", "gt", "ge", "equal"),
)
# Writes that optimizers make by the thousand, by the methods that make them. A handler, which is
# Python, takes as long as the operation: of these there is one only while a plain tensor is given.
_OFTEN = {
    **{name: name for name in ("add_", "mul_", "lerp_", "addcmul_", "addcdiv_")},
    "__iadd__": "add_",
    "__imul__": "mul_",
}


@functools.cache
def take_plain_operands() -> None:
    """Let operations on DTensors take plain tensors, for the process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    for operation in _writes():
        if operation.overloadpacket.__name__ not in _OFTEN:
            handlers.setdefault(operation, _write)
    for method, name in _OFTEN.items():
        setattr(DTensor, method, _handled(method, name))
    for name in _READS:
        for operation in _overloads(name):
            handlers.setdefault(operation, _read)
    # The gradient of ``weight[rows]``.
    handlers.setdefault(torch.ops.aten.index_put.default, _read_whole)
    DTensor.data = property(DTensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]


def _overloads(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


def _handled(method: str, name: str) -> Callable[..., Any]:
    """Return ``DTensor.method``, which runs the operation ``name``, with :func:`_write` as its
    handler if a plain tensor is given."""
    as_before = getattr(DTensor, method)
    handled = dict.fromkeys(_overloads(name), _write)

    @functools.wraps(as_before)
    def run(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if not any(_is_plain(x) for x in (*args, *kwargs.values())):
            return as_before(self, *args, **kwargs)
        handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
        handlers.update(handled)
        try:
            return as_before(self, *args, **kwargs)
        finally:
            for operation in handled:
                handlers.pop(operation, None)

    return run


def _writes() -> Iterator[Any]:
    """The operations that write into a tensor, or several, what they make of others."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace != "aten":
            continue
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        schema = operation._schema
        # Others return a result beside what they write for themselves, such as running means.
        in_place = packet.endswith("_") and schema.is_mutable
        operands = [each for each in schema.arguments if "Tensor" in str(each.type)]
        writes = in_place or any(each.is_out for each in schema.arguments)
        # Those of this tag change the shape or the storage of a tensor.
        if writes and len(operands) > 1 and torch.Tag.inplace_view not in operation.tags:
            yield operation


def _write(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` on full tensors if a plain one is among them, else as DTensor does."""
    tensors = list(_tensors(args, kwargs))
    plain = [x for x in tensors if _is_plain(x)]
    # A number that is written to is no operand: ``total.copy_(weight.sum())``.
    into_plain = isinstance(args[0], Tensor) and not isinstance(args[0], DTensor)
    if not plain and not into_plain:
        return _as_dtensor_does(operation, args, kwargs)
    _refuse_gradients(operation, plain)
    try:
        return write_whole(operation, args, kwargs)
    except (SPCompilerError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        parts = [x for x in tensors if isinstance(x, DTensor)]
        for operand, x in itertools.product(plain, parts):
            if operand.shape == x.to_local().shape != x.shape:
                raise ArgumentError(
                    f"{operation}: a plain tensor beside a parameter means the same full tensor on "
                    f"every rank; got shape {tuple(operand.shape)}, that of this rank's part of a "
                    f"DTensor of shape {tuple(x.shape)}, expected what broadcasts to all of it. "
                    "parameter.to_local() is this rank's part as a plain tensor"
                ) from error
        raise


def _read(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` as DTensor does, plain tensors being replicated."""
    mesh = _mesh_of_read(operation, args, kwargs)
    if mesh is not None:
        replicated = functools.partial(_replicated, mesh=mesh)
        args, kwargs = pytree.tree_map(replicated, (tuple(args), dict(kwargs)))
    return _as_dtensor_does(operation, args, kwargs)


def _read_whole(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` on full tensors if a plain one is among them, else as DTensor does."""
    mesh = _mesh_of_read(operation, args, kwargs)
    if mesh is None:
        return _as_dtensor_does(operation, args, kwargs)
    args, kwargs = pytree.tree_map(full_value, (tuple(args), dict(kwargs)))
    return _replicated(operation(*args, **kwargs), mesh)


def _mesh_of_read(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeviceMesh | None:
    """Return the mesh over which plain tensors among the arguments are replicated; ``None`` if
    there are none."""
    tensors = list(_tensors(args, kwargs))
    plain = [x for x in tensors if _is_plain(x)]
    if not plain:
        return None
    _refuse_gradients(operation, plain)
    mesh: DeviceMesh = next(x.device_mesh for x in tensors if isinstance(x, DTensor))
    if mesh.ndim > 1 or mesh.mesh_dim_names not in (None, (AXIS,)):
        raise UnsupportedError(
            f"{operation} of a plain tensor of shape {tuple(plain[0].shape)} and a DTensor over "
            f"{mesh}, whose ranks may have data of their own: {_WHAT_TO_DO}"
        )
    return mesh


def _as_dtensor_does(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    # DTensor asks for a handler first, and would come back to it.
    handler = handlers.pop(operation, None)
    try:
        return operation(*args, **kwargs)
    finally:
        if handler is not None:
            handlers[operation] = handler


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    # By hand, for it takes a fifth of the time of a tree; lists are not nested.
    for value in (*args, *kwargs.values()):
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, Tensor):
                yield x


def _is_plain(x: Any) -> bool:
    # Numbers are no trouble.
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
                f"requires a gradient, which would be a DTensor: {_WHAT_TO_DO}"
            )


def _set_data(self: DTensor, value: Tensor) -> None:
    """Make ``self`` the tensor ``value``, as on one device: what ``self.data`` was stays as it was,
    so that ``before = p.data; p.data = averaged; ...; p.data = before`` brings the numbers back."""
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
    if isinstance(self, GatheredView) or self.device_mesh.mesh_dim_names != (AXIS,):
        # FSDP, for one, gathers from memory of its own, not from the DTensor.
        raise UnsupportedError(
            f"data of a DTensor over {self.device_mesh} is set, of which others hold the memory: "
            "write the values: parameter.data.copy_(values)"
        )
    self._local_tensor = part
    # A backward of before would read the new numbers: it raises, as after any write.
    if not self.is_inference():
        torch.autograd.graph.increment_version(self)


def _part_like(x: DTensor, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``: its own memory if ``value`` is placed like ``x``."""
    if isinstance(value, DTensor) and value.placements == x.placements:
        part = value._local_tensor
        if value.device_mesh == x.device_mesh and part.stride() == x._local_tensor.stride():
            return part
    # Not the memory of a full tensor, which other parts share.
    copied: Any = x.detach().clone()
    copied.copy_(value)
    local: Tensor = copied._local_tensor
    return local
