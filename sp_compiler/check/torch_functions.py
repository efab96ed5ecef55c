"""ATen calls rewritten as the torch functions that ``spmd_types`` has rules for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import arguments
from sp_compiler.ir.reshapes import matching_spans
from sp_compiler.rules.families.fourier import PRIMITIVES, TRANSFORMS
from sp_compiler.rules.families.images import LINEAR

aten = torch.ops.aten
Function = Callable[..., Any]

UNKNOWN_LINEAR = frozenset(
    {"aten::_to_copy", "aten::to", "aten::where", "aten::masked_fill", "aten::pad"}
    | {"aten::constant_pad_nd", "aten::slice_scatter", "aten::select_scatter", "aten::linear"}
    | {"aten::scaled_dot_product_attention", "aten::native_dropout_backward", "aten::tril"}
    | {"aten::triu", "aten::index_put", "aten::_unsafe_index_put", "aten::numpy_T"}
    | {"aten::_unsafe_view", "aten::alias", "aten::lift_fresh_copy", "aten::slice"}
    | {"aten::gather", "aten::scatter", "aten::scatter_add", "aten::view_as_complex"}
    | {"aten::view_as_real", "aten::index_add", "aten::index_select", "aten::copy"}
    | {"aten::_conj", "aten::conj_physical", "aten::complex"}
    | {"aten::pixel_shuffle", "aten::pixel_unshuffle", "aten::_unsafe_index"}
    | {"aten::linalg_cross", "aten::index_copy", "aten::index_fill"}
    | {"aten::linalg_solve_triangular"}
) | {*TRANSFORMS, *PRIMITIVES, *LINEAR}
"""Linear operators that ``spmd_types`` does not know to be linear: it refuses partial sums."""


def is_rewritten(node: Node) -> bool:
    """Return whether the call is rewritten to one with sizes that fit a shard."""
    return node.target._schema.name in _REWRITTEN


def call(node: Node, values: dict[Node, Any]) -> Any:
    """Run the torch function of ``node`` on meta tensors."""
    name = node.target._schema.name
    rewritten = _REWRITTEN.get(name)
    if rewritten is not None:
        # By name, for the schema and the function may order their arguments differently; "self"
        # cannot be a keyword of a plain function's first argument.
        named = tree_map_only(Node, values.__getitem__, arguments(node))
        return rewritten(**{f"{key}_" if key == "self" else key: v for key, v in named.items()})
    args, kwargs = tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
    if "device" in kwargs:  # a factory, which would allocate there
        kwargs = {**kwargs, "device": "meta"}
    return _public(node)(*args, **kwargs)


def _public(node: Node) -> Function:
    """Return the public function of the operator's name; the operator, if there is none."""
    # spmd_types knows public functions; it does not look through an overload of ``torch.ops``.
    name = node.target._schema.name.split("::")[1]
    for namespace in (torch, torch._C._nn, torch.Tensor):
        if (function := getattr(namespace, name, None)) is not None:
            return function
    return node.target


def is_written_in_python(node: Node) -> bool:
    """Return whether the public function may take other arguments than the operator (stft)."""
    return isinstance(_public(node), FunctionType) and not is_rewritten(node)


def _slice(
    self_: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    # ``narrow`` is typed, slices are not. It has no stride: with one the slice stays a slice.
    begin, stop, stride = slice(start, end, step).indices(self_.shape[dim])
    if stride != 1:
        return aten.slice.Tensor(self_, dim, start, end, step)
    return torch.narrow(self_, dim, begin, max(0, stop - begin))


def _expand(self_: Tensor, size: Sequence[int], implicit: bool = False) -> Tensor:
    """Expand with -1 for dims that keep their size: the one given is one rank's."""
    # From the right, as broadcasting aligns them.
    added = len(size) - self_.dim()
    pairs = zip(self_.shape, size[added:], strict=True)
    return self_.expand(
        [*size[:added], *(-1 if before == after else after for before, after in pairs)]
    )


def _split(self_: Tensor, split_sizes: list[int], dim: int = 0) -> Sequence[Tensor]:
    return torch.split(self_, split_sizes, dim)


def _to_copy(self_: Tensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    return self_.to(dtype or self_.dtype)


def _detach(self_: Tensor) -> Tensor:
    return self_.detach()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **kwargs: Any
) -> Tensor:
    """Run attention without the causal mask, whose tensors ``spmd_types`` does not see."""
    return F.scaled_dot_product_attention(query, key, value, **kwargs)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    # DTensor before torch 2.12 counts a negative dim from the operands' end, not the result's.
    return torch.stack(tuple(tensors), dim % (tensors[0].dim() + 1))


_REWRITTEN: dict[str, Function] = {
    "aten::slice": _slice,
    "aten::expand": _expand,
    "aten::split_with_sizes": _split,
    "aten::_to_copy": _to_copy,
    "aten::detach": _detach,
    "aten::stack": _stack,
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
        if high == low:  # a new dim of size 1, which no dim of ``source`` accounts for
            x = torch.unsqueeze(x, low)
        if last - first != 1:
            sizes = [-1 if dim == placement.dim else target[dim] for dim in range(first, last)]
            x = torch.unflatten(x, low, sizes) if sizes else torch.squeeze(x, low)
    return x
