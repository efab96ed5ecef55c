"""Random calls of every operator that has a sharding rule.

Most are drawn from the operator's schema: tensors of shapes that broadcast, and for every other
argument a value by its name or type. What has a shape of its own is written out by families.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.helpers.op_samples import (
    attention,
    elementwise,
    experts,
    fourier,
    images,
    indexing,
    norms,
    products,
    views,
)
from tests.helpers.op_samples.draw import Draw, Sample, Shape
from tests.helpers.operator_call import Call

aten = torch.ops.aten
_FAMILIES = (elementwise, products, norms, views, indexing, attention, experts, fourier, images)
_SPECIAL: dict[str, Sample] = {
    name: sample for family in _FAMILIES for name, sample in family.SAMPLES.items()
}


def overloads(name: str) -> list[Any]:
    """Overloads of an operator that work on tensors and change none of them."""
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [target for target in found if _is_tensor_operator(target) and target not in _EXCLUDED]


def _is_tensor_operator(target: Any) -> bool:
    types = [str(argument.type) for argument in target._schema.arguments]
    has_tensor = any("Tensor" in kind for kind in types)
    # Named dims have a type of their own since torch 2.12; before it they are strings.
    named = any(mark in target._overloadname.lower() for mark in ("dimname", "names", "named"))
    return has_tensor and not target._schema.is_mutable and not named


_EXCLUDED = {
    # what no captured graph holds: spellings of TorchScript, results that data decide, random
    aten.to.prim_Device, aten.to.prim_dtype, aten.to.prim_other, aten.numpy_T.a,
    aten.index.list_Tensor, aten.index.Tensor_hacked_twin, aten.index_put.hacked_twin,
    aten._unsafe_index.Tensor_hacked_twin,
    aten._unsafe_index_put.hacked_twin, aten.where.default, aten.equal.default,
    aten.narrow.Tensor, aten.rrelu.default, aten.copy.Dict_Tensor,
    aten.index_fill.int_Tensor,  # its gradient asks for indices without repeats
    # a product of 16-bit factors in 32 bits, on GPUs alone
    aten.mm.dtype, aten.bmm.dtype, aten.baddbmm.dtype, aten.addmm.dtype,
    aten._scaled_dot_product_flash_attention.quantized,
}  # fmt: skip


NEED_GPU = {
    getattr(aten, f"{name}{suffix}").default
    for name, suffix in itertools.product(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        ("", "_backward"),
    )
} | {aten._fused_rms_norm_backward.default, aten._grouped_mm.default}
"""Operators without a kernel for float64 on CPUs."""


def is_like_another(target: Any) -> bool:
    """Return whether the fast tests have another operator with the very same rule and samples."""
    name = target._schema.name
    return name in images.SAMPLES and bool(re.search(r"[13]d|cubic|grid_sampler$", name))


def pointwise() -> list[Any]:
    """Operators that PyTorch itself declares to be pointwise: they need no row in the table."""
    found = []
    for name in dir(aten):
        packet = getattr(aten, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [
                target
                for target in overloads(f"aten::{name}")
                if torch.Tag.pointwise in target.tags
            ]
    return found


def calls(target: Any, world_size: int, count: int) -> Iterator[Call]:
    """``count`` random calls, the same in every run."""
    special = _SPECIAL.get(str(target), _SPECIAL.get(target._schema.name))
    for number in range(count):
        draw = Draw(f"{target} {number}", world_size)
        if special is not None:
            args = special(draw)
            kwargs = args.pop() if isinstance(args[-1], dict) else {}
            yield Call(target, tuple(args), kwargs)
        else:
            yield _from_schema(target, draw)


_BY_NAME: dict[str, Callable[[Draw, Shape], Any]] = {
    "dim": lambda draw, shape: draw.dim(len(shape)),
    "dim0": lambda draw, shape: draw.dim(len(shape)),
    "dim1": lambda draw, shape: draw.dim(len(shape)),
    "dims": lambda draw, shape: draw.subset(len(shape)),
    "keepdim": lambda draw, shape: draw.one_of(True, False),
    "diagonal": lambda draw, shape: draw.one_of(-1, 0, 1),
    "condition": lambda draw, shape: draw.mask(*shape),
    "mask": lambda draw, shape: draw.mask(*shape),
    "value": lambda draw, shape: draw.one_of(0, 0.5),
    "dtype": lambda draw, shape: torch.float64,
    "min": lambda draw, shape: -0.5,
    "max": lambda draw, shape: 0.5,
    "device": lambda draw, shape: torch.device("cpu"),
}
_BY_TYPE: dict[str, Any] = {
    "number": 0.5, "float": 0.5, "int": 1, "SymInt": 1, "bool": False, "ScalarType": torch.float64,
}  # fmt: skip


def _from_schema(target: Any, draw: Draw) -> Call:
    """Floating numbers if the operator takes them, else integers."""
    state = draw.random.getstate()
    call = _fill(target, draw, integers=False)
    try:
        target(*call.args, **call.kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented for" not in str(error) and "ntegral" not in str(error):
            raise
        draw.random.setstate(state)
        call = _fill(target, draw, integers=True)
    return call


def _fill(target: Any, draw: Draw, *, integers: bool) -> Call:
    shape = draw.shape(2 if "tri" in target.__name__ else 1)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    whole = True
    for argument in target._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        if kind == "Tensor":
            size = shape if whole or "_backward" in target.__name__ else draw.narrower(shape)
            whole = False
            make = _BY_NAME.get(argument.name) if argument.name in ("condition", "mask") else None
            value = make(draw, size) if make else _numbers(draw, size, integers)
        elif argument.name in _BY_NAME:
            value = _BY_NAME[argument.name](draw, shape)
            if kind.startswith("List") and isinstance(value, int):
                value = draw.one_of([value], draw.subset(len(shape)))
        elif argument.has_default_value():
            continue
        else:
            value = 2 if integers and kind == "number" else _BY_TYPE.get(kind)
        if argument.kwarg_only or len(args) < target._schema.arguments.index(argument):
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Call(target, tuple(args), kwargs)


def _numbers(draw: Draw, shape: Shape, integers: bool) -> Tensor:
    return draw.ids(8, *shape) + 1 if integers else draw.numbers(*shape)
