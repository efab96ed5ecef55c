"""Modes that run graphs unchanged, but in higher precision, with other rounding, or without
dropout.

Verification compares the program that actually runs, with its own dtypes. Their rounding would hide
small errors, so it runs in float64 in spite of casts: a dispatch mode replaces every lower dtype
before a kernel is called. Graphs are not changed for that, so both sides of a comparison, including
eager code, run in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sp_compiler.inductor.fused import as_written
from sp_compiler.ops.uniform import UNIFORM
from sp_compiler.trace.exporting import kernel_eps

_aten = torch.ops.aten
_WIDE = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def widest(dtype: torch.dtype) -> torch.dtype:
    """Return the float64 dtype of the same kind; integers and bool are unchanged."""
    return torch.float64 if dtype.is_floating_point else _WIDE.get(dtype, dtype)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Context that computes everything in float64 and complex128, forward and backward."""
    default = torch.get_default_dtype()
    # For operators without floating-point operands: quotients of integers, factories.
    torch.set_default_dtype(torch.float64)
    try:
        # Kernels of a backend have fixed dtypes; the code they are compiled from runs in any.
        with Float64Mode(), as_written():
            yield
    finally:
        torch.set_default_dtype(default)


class Float64Mode(TorchDispatchMode):
    """Mode that gives every operator float64 in place of lower dtypes, in operands and
    arguments."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Its dtype determines the number of random bits; generated code calls the kernel directly.
        if func is UNIFORM.overload:
            return _lift(func(*args, **(kwargs or {})))
        # Arguments that are written are not converted: the write would go to the copy.
        lifted = _lift_dtypes if func._schema.is_mutable else _lift
        args = tuple(map(lifted, args))
        kwargs = {name: lifted(value) for name, value in (kwargs or {}).items()}
        kernel = _KERNELS.get(func._schema.name, func)
        if func in _HALF_TO_FLOAT:
            args = (*args[:2], False)
        return kernel(*args, **kwargs)


_HALF_TO_FLOAT = frozenset({_aten._softmax.default, _aten._log_softmax.default})
"""Their last argument requests a float32 result for a half operand; in float64 it is invalid."""


def _lift_dtypes(value: Any) -> Any:
    return widest(value) if isinstance(value, torch.dtype) else value


def _lift(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Constants in a graph have their own dtype.
        return value.to(widest(value.dtype)) if value.dtype != widest(value.dtype) else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(_lift, value))
    return _lift_dtypes(value)


def _grouped_mm(
    x: Tensor,
    y: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten::_grouped_mm`` in any dtype; torch has kernels only for bfloat16.

    Groups are rows of ``x``, columns of ``y`` or, if neither has a dim of groups, parts of the
    reduction dim.
    """
    if offs is None:
        return x @ y
    # Offsets are read on the host: this kernel is only a reference, whose time does not matter.
    ends = [int(end) for end in offs]
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if x.dim() == 2 and y.dim() == 2:
        return torch.stack([x[:, part] @ y[part] for part in parts])
    if x.dim() == 2:
        result = x.new_zeros(x.shape[0], y.shape[-1])
        for part, matrix in zip(parts, y, strict=True):
            result[part] = x[part] @ matrix
        return result
    result = x.new_zeros(x.shape[1], y.shape[-1])
    for part, matrix in zip(parts, x, strict=True):
        result[:, part] = matrix @ y[:, part]
    return result


_KERNELS: dict[str, Callable[..., Any]] = {"aten::_grouped_mm": _grouped_mm}


class KernelEps(TorchFunctionMode):
    """Mode that gives ``rms_norm`` the ``eps`` of a model's ``dtypes``.

    The ``eps`` of the dtype of the computation may differ: the default is 1.2e-7 in float32 and
    2.2e-16 in float64, and only in float32 a given value is rounded to float32.
    """

    def __init__(self, dtypes: Iterable[torch.dtype]) -> None:
        super().__init__()
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in (F.rms_norm, torch.rms_norm):
            return func(*args, **(kwargs or {}))
        values, shape, weight, eps = _arguments_of_norm(*args, **(kwargs or {}))
        return func(values, shape, weight, kernel_eps(eps, self._dtype))


def _arguments_of_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Sequence[int], Tensor | None, float | None]:
    return input, normalized_shape, weight, eps


class OtherRounding(TorchDispatchMode):
    """Mode with other rounding: sums run backwards, and every result is off by up to one unit.

    The change of a graph's results is its *noise floor*: in a comparison of two ways to compute the
    same value, errors below it cannot be distinguished from rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        # A separate generator: the model's draws must be the same with and without the mode.
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Perturbing only results would omit the error of long sums, which sharding changes.
        if func in _REVERSED:
            args = _REVERSED[func](*args)
        result = func(*args, **kwargs)
        if (
            func.is_view
            # The result is an operand, which a perturbed one would no longer be.
            or func._schema.is_mutable
            or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(args))
        ):
            return result
        return pytree.tree_map_only(Tensor, self._moved, result)

    def _moved(self, value: Tensor) -> Tensor:
        if not (value.is_floating_point() or value.is_complex()):
            return value
        unit = torch.finfo(value.dtype).eps
        noise = torch.rand(
            value.shape, generator=self._generator, dtype=torch.float32, device="cpu"
        )
        factor = (1 + unit * (noise.double() - 0.5) * 2).to(value.device)
        moved = (value.to(widest(value.dtype)) * factor).to(value.dtype)
        # Integers are exact (positions, masks, results of rounding): perturbed by a unit, they
        # would become other integers when cast. Infinities stay too.
        return moved if value.is_complex() else torch.where(value == value.round(), value, moved)


def _flip_mm(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.flip(-1), y.flip(-2)


def _flip_addmm(bias: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return bias, *_flip_mm(x, y)


_REVERSED: dict[Any, Callable[..., tuple[Any, ...]]] = {
    _aten.mm.default: _flip_mm,
    _aten.bmm.default: _flip_mm,
    _aten.addmm.default: _flip_addmm,
    _aten.baddbmm.default: _flip_addmm,
    _aten.sum.default: lambda x: (x.flip(list(range(x.dim()))),),
    _aten.sum.dim_IntList: lambda x, dims=None, *rest: (
        x.flip(dims or list(range(x.dim()))),
        dims,
        *rest,
    ),
}


class Remembered(TorchDispatchMode):
    """Mode that computes an operator once for the same operands.

    The graphs of a comparison share most operators: those that no pass has rewritten read the same
    tensors, so the result from the other graph is reused. Enter it outside of all other modes, so
    that it sees the arguments of kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, tuple[Any, Any]] = {}
        self._written: set[int] = set()
        self._num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in operands if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            # Tensors that share memory with an operand may have changed: their results are not
            # reused.
            self._written.update(map(_memory, tensors))
            return func(*args, **kwargs)
        if (
            # A user's operator may return another result the second time.
            func.namespace not in ("aten", "sp_compiler")
            or func.is_view
            or _draws(func, args, kwargs)
            or not self._written.isdisjoint(map(_memory, tensors))
        ):
            return func(*args, **kwargs)
        # The default dtype, which some results have, differs between two precisions.
        key = func, torch.get_default_dtype(), _operand_key(args), _operand_key(kwargs)
        # The entry keeps the operands alive, so that no other tensor gets their addresses.
        _, result = self._results.get(key, (None, None))
        if result is not None and self._written.isdisjoint(
            _memory(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)
        ):
            return pytree.tree_map_only(Tensor, Tensor.detach, result)
        result = func(*args, **kwargs)
        self._num_bytes += sum(
            leaf.nbytes for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)
        )
        if self._num_bytes < _REMEMBERED_BYTES:
            # Detached tensors with the same memory: autograd attaches its graph to those returned.
            detached = pytree.tree_map_only(Tensor, Tensor.detach, (operands, result))
            self._results[key] = detached
        return result


_REMEMBERED_BYTES = 4 << 30
"""Beyond this limit results are computed again, since memory is scarcer than time."""


def _draws(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    # Fused attention is tagged for its dropout, which is seldom on.
    position = names.index("dropout_p")
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _operand_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        layout = value.storage_offset(), value.shape, value.stride()
        return _memory(value), layout, value.dtype, (value.is_conj(), value.is_neg())
    if isinstance(value, (list, tuple)):
        return tuple(map(_operand_key, value))
    if isinstance(value, dict):
        return tuple((name, _operand_key(each)) for name, each in value.items())
    # With the type and text, since 1, 1.0 and True are equal, and so are zeros of both signs.
    return type(value), repr(value) if isinstance(value, float) else value


class NothingDropped(TorchDispatchMode):
    """Mode in which dropout drops nothing, but scales as usual.

    Eager dropout draws from torch's generator and ours from a counter, so they can only be compared
    without drops, even if a model drops in eval mode.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kernel = _KEEP_ALL.get(func._schema.name, func)
        return kernel(*args, **(kwargs or {}))


def _scaled(x: Tensor, p: float) -> Tensor:
    return x / (1 - p) if p < 1 else x * 0.0


def _keep_native(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return (_scaled(x, p) if train else x), torch.ones_like(x, dtype=torch.bool)


_KEEP_ALL: dict[str, Callable[..., Any]] = {
    "aten::native_dropout": _keep_native,
    "aten::bernoulli": lambda x, *rest, **options: torch.ones_like(x),
    "aten::bernoulli_": lambda x, *rest, **options: x.fill_(1),
    "sp_compiler::dropout": lambda x, seed, p, *rest: _scaled(x, p),
    "sp_compiler::dropout_mask": lambda x, *rest: torch.ones_like(x, dtype=torch.bool),
}
