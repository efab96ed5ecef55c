"""ATen calls spelled as the torch functions whose typing ``spmd_types`` knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.reshapes import matching_spans

aten = torch.ops.aten
Function = Callable[..., Any]

RESHAPES = (aten.reshape.default, aten.view.default)
UNKNOWN_LINEAR = frozenset(
    {"aten::_to_copy", "aten::to", "aten::where", "aten::masked_fill", "aten::pad"}
    | {"aten::constant_pad_nd", "aten::slice_scatter", "aten::select_scatter", "aten::linear"}
    | {"aten::scaled_dot_product_attention", "aten::native_dropout_backward", "aten::tril"}
    | {"aten::triu", "aten::index_put", "aten::_unsafe_index_put", "aten::numpy_T"}
    | {"aten::_unsafe_view", "aten::alias", "aten::lift_fresh_copy", "aten::slice"}
    | {"aten::gather", "aten::scatter", "aten::scatter_add", "aten::view_as_complex"}
    | {"aten::view_as_real"}
)
"""Linear operators that ``spmd_types`` does not know to be linear: it refuses partial sums."""


def is_spelled(node: Node) -> bool:
    """Whether the call is written so that its sizes fit a shard."""
    return node.target._schema.name in _SPELLED


def call(node: Node, values: dict[Node, Any]) -> Any:
    """Run the torch function of ``node`` on meta tensors."""
    name = node.target._schema.name
    spell = _SPELLED.get(name)
    if spell is not None:
        named = tree_map_only(Node, values.__getitem__, arguments(node))
        return spell(**{f"{key}_" if key == "self" else key: v for key, v in named.items()})
    args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    return _function(name.split("::")[1], node.target)(*args, **kwargs)


def _function(name: str, target: Any) -> Function:
    # spmd_types knows public functions; an overload of ``torch.ops`` it does not look through.
    for namespace in (torch, torch._C._nn, torch.Tensor):
        if hasattr(namespace, name):
            return getattr(namespace, name)
    return target


def _slice(
    self_: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    # ``narrow`` is typed, slices are not; a stride has no such twin.
    begin, stop, stride = slice(start, end, step).indices(self_.shape[dim])
    if stride != 1:
        return aten.slice.Tensor(self_, dim, start, end, step)
    return torch.narrow(self_, dim, begin, max(0, stop - begin))


def _expand(self_: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    """Dims that stay as they are, perhaps sharded, are written -1: their size is one rank's."""
    # From the right, as broadcasting aligns them.
    added = len(size) - self_.dim()
    kept = [-1 if own == new else new for own, new in zip(self_.shape, size[added:], strict=True)]
    return self_.expand([*size[:added], *kept])


def _split(self_: Tensor, split_sizes: list[int], dim: int = 0) -> Sequence[Tensor]:
    return torch.split(self_, split_sizes, dim)


def _to_copy(self_: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return self_.to(dtype or self_.dtype)


def _detach(self_: Tensor) -> Tensor:
    return self_.detach()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **kwargs: Any
) -> Tensor:
    """Without the causal mask, which is made of tensors that ``spmd_types`` does not see."""
    return F.scaled_dot_product_attention(query, key, value, **kwargs)


_SPELLED: dict[str, Function] = {
    "aten::slice": _slice,
    "aten::expand": _expand,
    "aten::split_with_sizes": _split,
    "aten::_to_copy": _to_copy,
    "aten::detach": _detach,
    "aten::scaled_dot_product_attention": _attention,
}


def reshape(
    x: Tensor, source: Sequence[int], target: Sequence[int], placement: Placement
) -> Tensor:
    """Reshape one rank's part by ``flatten`` and ``unflatten``, whose -1 is the sharded dim.

    Args:
        x: sharded on one dim.
        source: global shape of ``x``.
        target: global shape of the result.
        placement: of the result.
    """
    # From the last dims to the first, so that the numbers of those in front stay valid.
    for (low, high), (first, last) in reversed(matching_spans(source, target)):
        if high - low > 1:
            x = torch.flatten(x, low, high - 1)
        if high == low:
            x = torch.unsqueeze(x, low)
        if last - first != 1:
            sizes = [-1 if dim == placement.dim else target[dim] for dim in range(first, last)]
            x = torch.unflatten(x, low, sizes) if sizes else torch.squeeze(x, low)
    return x
