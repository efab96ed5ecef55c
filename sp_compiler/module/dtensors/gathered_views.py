"""Views of a sharded dim of a DTensor that can be written to.

``weight[0]``, ``weight[:3]`` and ``weight.diagonal()`` of a weight whose rows are sharded are not
views: DTensor gathers the rows and takes them from the copy, and a write into it, as in
``weight[0].zero_()``, is silently lost. Here such a copy knows its source. A write has the same
effect as on one device: every rank runs the operation on that view of the full tensor, and keeps
its part. If it is read after the tensor has changed, it is gathered again.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.ir.fx import written_arguments

# View operations for which DTensor gathers or raises an error.
_GATHERING = tuple(
    getattr(torch.ops.aten, name)
    for name in (
        *("select", "slice", "split", "split_with_sizes", "diagonal", "view", "unbind", "unfold"),
        *("as_strided", "expand", "permute", "squeeze", "t", "transpose", "unsqueeze", "alias"),
        "detach",
    )
)
# DTensor runs these writes wrongly, on each rank's part as if it were the full tensor, or raises an
# error, as for ``weight[rows] = 0``.
_WRITTEN_WHOLE = tuple(
    getattr(torch.ops.aten, name)
    for name in (
        *("index_add_", "index_copy_", "index_fill_", "index_put_", "masked_scatter_", "put_"),
        *("scatter_", "scatter_add_", "scatter_reduce_", "cumprod_", "cumsum_", "renorm_"),
        *("tril_", "triu_", "eye", "fill_diagonal_", "_foreach_copy_"),
    )
)
_View = Callable[[Tensor], Tensor]


def handle(operations: Iterable[Any], handler: Callable[..., Any]) -> None:
    """Make DTensor call ``handler(operation, args, kwargs)`` for ``operations``, for the
    process."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(operations, handler))


def overloads_of(packets: Iterable[Any]) -> list[Any]:
    """Return all overloads of ``packets``."""
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


@functools.cache
def write_through_views() -> None:
    """Make writes into views of DTensors reach the ranks that hold the elements, for the
    process."""
    handle(overloads_of(_GATHERING), _take_view)
    handle(overloads_of(_WRITTEN_WHOLE), write_whole)
    handle(overloads_of([torch.ops.aten.squeeze_]), _squeeze)
    # ``weight[0] = 1.0``, which has no rule; other fills have one.
    handle([torch.ops.aten.fill_.Tensor], write_whole)
    if TorchVersion(torch.__version__) < "2.12":
        _dispatch_to_views()


class GatheredView(DTensor):
    """A copy that stands for ``_view(_source)``."""

    _source: DTensor
    _view: _View
    _seen: int | None

    # A property, since redistribute() and to_local() read this attribute without an operation.
    @property
    def _local_tensor(self) -> Tensor:
        if self._seen != _state(self._source):
            with torch.no_grad():
                self._local_tensor = self._view(self._source)._local_tensor  # type: ignore[attr-defined]
            self._seen = _state(self._source)
        return cast(Tensor, self.__dict__["_gathered"])

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:
        self.__dict__["_gathered"] = value

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _operate(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class _ViewOperations(TorchDispatchMode):
    """Mode that dispatches operations on gathered views to their ``__torch_dispatch__``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        of_views = any(isinstance(x, GatheredView) for x in pytree.tree_leaves((args, kwargs)))
        return _operate(func, args, kwargs) if of_views else func(*args, **kwargs)


def _dispatch_to_views() -> None:
    """Make torch 2.11, which does not call ``__torch_dispatch__`` of subclasses of DTensor, do so
    like later versions."""

    def torch_function(
        cls: type, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass(), _ViewOperations():
            return func(*args, **(kwargs or {}))

    def in_mode(method: Callable[..., Any]) -> Callable[..., Any]:
        # ``weight[2, 3] = 1`` takes a view of a view and writes to it, in one call on a DTensor.
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _ViewOperations():
                return method(*args, **kwargs)

        return call

    GatheredView.__torch_function__ = classmethod(torch_function)  # type: ignore[assignment]
    DTensor.__getitem__ = in_mode(DTensor.__getitem__)  # type: ignore[method-assign]
    DTensor.__setitem__ = in_mode(DTensor.__setitem__)  # type: ignore[method-assign]
    DTensor.fill_diagonal_ = in_mode(DTensor.fill_diagonal_)  # type: ignore[method-assign]


def _operate(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation``, some of whose arguments are gathered views."""
    if operation._schema.is_mutable:
        return write_whole(operation, args, kwargs)
    result = operation(*pytree.tree_map(_plain, args), **pytree.tree_map(_plain, kwargs))
    return _standing_for(result, operation, args, kwargs) if operation.is_view else result


@torch.no_grad()
def write_whole(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation``, which writes into DTensors or views of them, on full tensors, and keep
    this rank's part.

    Values that differ between ranks, such as random numbers, are those of rank 0.
    """
    if torch.Tag.inplace_view in operation.tags:
        raise UnsupportedError(
            f"{operation} of a view of a sharded dim: use the operation that returns a view"
        )
    roots = {id(root): root for root in map(_root, _written(operation, args, kwargs))}
    if len({id(_owner(root)) for root in roots.values()}) < len(roots):
        raise UnsupportedError(
            f"{operation} writes into two views of the same tensor, one of which DTensor gathers; "
            "write into them one after the other"
        )
    if any(placement.is_partial() for root in roots.values() for placement in root.placements):
        raise UnsupportedError(f"{operation} of a DTensor with pending sums: redistribute it first")
    full_tensors: dict[int, Tensor] = {}

    def full(x: Any) -> Any:
        if isinstance(x, GatheredView):
            return x._view(full(x._source))
        if not isinstance(x, DTensor):
            return x
        if id(x) not in full_tensors:
            full_tensors[id(x)] = full_value(x)
        return full_tensors[id(x)]

    operation(*pytree.tree_map(full, args), **pytree.tree_map(full, kwargs))
    for key, root in roots.items():
        _keep_part(root, full_tensors[key])
    return return_and_correct_aliasing(operation, args, kwargs, None)


def _written(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[DTensor]:
    """Return the DTensors that ``operation`` writes into."""
    return [x for x in written_arguments(operation, args, kwargs) if isinstance(x, DTensor)]


def settle_sums(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Reduce pending sums into which ``operation`` writes, in place; return whether there were
    any."""
    pending = [
        x for x in _written(operation, args, kwargs) if any(p.is_partial() for p in x.placements)
    ]
    for x in pending:
        places = [Replicate() if p.is_partial() else p for p in x.placements]
        settled = cast(DTensor, x.detach()).redistribute(placements=places)
        x._local_tensor, x._spec = settled._local_tensor, settled._spec
    return bool(pending)


def _keep_part(x: DTensor, full: Tensor) -> None:
    """Copy this rank's part of rank 0's ``full`` into ``x``."""
    part = distribute_tensor(full, x.device_mesh).redistribute(placements=x.placements)
    x.to_local().copy_(part.to_local())


def run_past_handlers(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Run ``operation`` as DTensor does without a custom handler; return its result and the
    sharding of its arguments and result."""
    dispatcher = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(operation, tuple(args), dict(kwargs))
    dispatcher.sharding_propagator.propagate(call)
    local = dispatcher._dispatch_get_local_results_slow_path(operation, tuple(args), call)
    sharding = call.output_sharding
    assert sharding is not None
    return dispatcher.wrap(local, sharding.output_spec), sharding


def by_rule_or_whole(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` as DTensor does, or on full tensors if torch has no rule for it: 2.11 has
    none for losses with logits and ``nansum``."""
    try:
        return run_past_handlers(operation, args, kwargs)[0]
    except NotImplementedError:
        mesh = next(x.device_mesh for x in args if isinstance(x, DTensor))
        replicate = functools.partial(replicated, mesh=mesh)
        result = operation(*map(full_value, args), **kwargs)
        return pytree.tree_map_only(Tensor, replicate, result)


def _take_view(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` as DTensor does, and return a :class:`GatheredView` if the result is a
    copy."""
    if operation is torch.ops.aten.as_strided.default and _is_whole(*args):
        return torch.ops.aten.alias.default(args[0])
    try:
        with _in_mode_of(args[0]):
            result, sharding = run_past_handlers(operation, args, kwargs)
    except (KeyError, NotImplementedError, RuntimeError):
        if torch.compiler.is_compiling() or not has_groups(args[0].device_mesh):
            raise
        # DTensor cannot split the dim or has no rule; a KeyError if it flattens segments that are
        # not in the first dim.
        return _standing_for(_view_of_full(operation, args, kwargs), operation, args, kwargs)
    if type(args[0]) is DTensor:  # torch checks the class; outputs of modules have our own
        result = return_and_correct_aliasing(operation, args, kwargs, result)
    needed = sharding.redistribute_schema
    # A traced graph cannot contain our class; its in-place writes are torch's.
    gathers = needed is not None and needed.args_spec[0].placements != args[0].placements
    if not gathers or torch.compiler.is_compiling():
        return result
    return _standing_for(result, operation, args, kwargs)


@contextlib.contextmanager
def _in_mode_of(x: DTensor) -> Iterator[None]:
    """Leave inference mode for views of ``x`` if it is not an inference tensor, as they are not
    either."""
    if not torch.is_inference_mode_enabled() or x.is_inference():
        yield
        return
    # Leaving it would enable autograd, but this runs below autograd. A local tensor may require a
    # gradient, as in DTensor.from_local, which must not be recorded for its views.
    with torch.inference_mode(False), torch._C._AutoDispatchBelowAutograd():
        yield


def _squeeze(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``operation`` in place, and set the new shape of the DTensor, which torch does not do if
    its placements stay the same."""
    _, sharding = run_past_handlers(operation, args, kwargs)
    args[0]._spec = sharding.output_spec
    return return_and_correct_aliasing(operation, args, kwargs, args[0])


def _is_whole(x: DTensor, sizes: Sequence[int], strides: Sequence[int], offset: Any = None) -> bool:
    """Return whether these are the sizes and strides of ``x``."""
    return x.shape == tuple(sizes) and x.stride() == tuple(strides) and not offset


def _view_of_full(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``operation`` on the full tensor of ``args[0]``, replicated."""
    source, *others = args
    replicate = functools.partial(replicated, mesh=source.device_mesh)
    return pytree.tree_map_only(Tensor, replicate, operation(full_value(source), *others, **kwargs))


def replicated(value: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return ``value``, which all ranks have, as a DTensor."""
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _standing_for(
    result: Any, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return ``result``, one or several gathered DTensors, as :class:`GatheredView` of
    ``args[0]`` by ``operation``."""
    source, *others = args

    def standing_for(value: DTensor, view: _View) -> GatheredView:
        with _in_mode_of(source):
            copied = GatheredView(value._local_tensor, value._spec, requires_grad=False)
        copied._source, copied._view, copied._seen = source, view, _state(source)
        return copied

    if isinstance(result, DTensor):
        return standing_for(result, lambda x: operation(x, *others, **kwargs))

    def part(x: Tensor, index: int) -> Tensor:
        return cast(Tensor, operation(x, *others, **kwargs)[index])

    return [
        standing_for(value, functools.partial(part, index=index))
        for index, value in enumerate(result)
    ]


def _plain(x: Any) -> Any:
    if not isinstance(x, GatheredView):
        return x
    return DTensor(x._local_tensor, x._spec, requires_grad=False)


def has_groups(mesh: DeviceMesh) -> bool:
    """Return whether the ranks of ``mesh`` can communicate: a mesh on which placements are only
    checked, with tensors on the meta device, has no process groups."""
    try:
        mesh.get_group(0)
    except RuntimeError:
        return False
    return True


def full_value(x: Any) -> Any:
    """Return the full tensor of a DTensor, a collective; anything else unchanged."""
    if not isinstance(x, DTensor):
        return x
    # Detached, since torch 2.11 cannot gather a tensor that requires a gradient below autograd.
    full = cast(DTensor, x.detach()).full_tensor()
    strides = x.stride()
    if full.stride() == strides or not all(strides):
        return full
    # A tensor gathered along another dim than the first has other strides than the original.
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=full.device).copy_(full)


def _root(x: DTensor) -> DTensor:
    while isinstance(x, GatheredView):
        x = x._source
    return x


def _owner(x: DTensor) -> Tensor:
    """Return the tensor that ``x`` is a view of."""
    root = _root(x)
    return root if root._base is None else root._base


def _state(x: DTensor) -> int | None:
    """Return the version of ``x``, which changes with each write, on all ranks."""
    owner = _owner(x)
    # Not that of the local tensor: if only one rank writes into its own, only that would gather.
    return None if owner.is_inference() else owner._version
