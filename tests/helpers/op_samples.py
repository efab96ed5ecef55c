"""Random calls of every operator that has a sharding rule.

Most are drawn from the operator's schema: tensors of shapes that broadcast, and for every other
argument a value by its name or type. What has a shape of its own is written out in ``_SPECIAL``.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401 - registers the grouped product
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.trace.autograd_functions import Call as FunctionCall
from sp_compiler.trace.autograd_functions import number_of
from tests.helpers.one_operator import Call

aten = torch.ops.aten
Shape = tuple[int, ...]
Args = list[Any]


class Draw:
    """Random sizes, most of them multiples of the number of ranks, and tensors."""

    def __init__(self, seed: str, world_size: int) -> None:
        number = zlib.crc32(seed.encode())
        self.random = random.Random(number)
        self.generator = torch.Generator().manual_seed(number)
        self.world_size = world_size

    def size(self) -> int:
        return self.random.choice((1, 5, *(self.world_size * n for n in (1, 2, 3, 4, 6))))

    def shape(self, lowest: int = 1, highest: int = 3) -> Shape:
        return tuple(self.size() for _ in range(self.random.randint(lowest, highest)))

    def narrower(self, shape: Shape) -> Shape:
        """Broadcasts to ``shape``."""
        kept = self.random.choice((0, 0, *range(len(shape))))
        return tuple(size if self.random.random() < 0.8 else 1 for size in shape[kept:])

    def subset(self, count: int) -> list[int]:
        """Some of ``range(count)``, at least one, counted from either end."""
        found = self.random.sample(range(count), self.random.randint(1, count))
        return [number - count * self.random.randint(0, 1) for number in found]

    def dim(self, rank: int) -> int:
        return self.random.randrange(-rank, rank)

    def parts(self, size: int) -> list[int]:
        """Sizes that add up to ``size``."""
        cut = self.random.randint(1, max(1, size // self.world_size)) * self.world_size
        return [cut, size - cut] if cut < size else [size]

    def one_of(self, *values: Any) -> Any:
        return self.random.choice(values)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        return self.numbers(*shape) > 0

    def ids(self, below: int, *shape: int) -> Tensor:
        return torch.randint(0, below, shape, generator=self.generator)


def overloads(name: str) -> list[Any]:
    """Overloads of an operator that work on tensors and change none of them."""
    namespace, _, short = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), short)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [target for target in found if _is_tensor_operator(target) and target not in _EXCLUDED]


def _is_tensor_operator(target: Any) -> bool:
    types = [str(argument.type) for argument in target._schema.arguments]
    has_tensor = any("Tensor" in kind for kind in types)
    return has_tensor and not target._schema.is_mutable and "Dimname" not in "".join(types)


_EXCLUDED = {
    # what no captured graph holds: spellings of TorchScript, results that data decide, random
    aten.to.prim_Device, aten.to.prim_dtype, aten.to.prim_other, aten.numpy_T.a,
    aten.index.list_Tensor, aten.index.Tensor_hacked_twin, aten.index_put.hacked_twin,
    aten._unsafe_index_put.hacked_twin, aten.where.default, aten.equal.default,
    aten.narrow.Tensor, aten.rrelu.default,
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


# Calls from schemas.

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


# Calls of what has a shape of its own.


def _linear(draw: Draw) -> Args:
    *lead, inner = draw.shape(1)
    out = draw.size()
    bias = draw.one_of([], [draw.numbers(out)])
    return [draw.numbers(*lead, inner), draw.numbers(out, inner), *bias]


def _product(draw: Draw, batch: Shape, other: Shape | None = None) -> Args:
    m, k, n = draw.size(), draw.size(), draw.size()
    return [draw.numbers(*batch, m, k), draw.numbers(*(batch if other is None else other), k, n)]


def _matmul(draw: Draw) -> Args:
    batch = draw.shape(0, 2)
    batches = [batch, draw.narrower(batch) if batch else ()]
    draw.random.shuffle(batches)
    return _product(draw, *batches)


def _added_product(draw: Draw, batch: Shape) -> Args:
    left, right = _product(draw, batch)
    result = (*batch, left.shape[-2], right.shape[-1])
    return [draw.numbers(*draw.narrower(result)), left, right]


def _convolution(draw: Draw, num_dims: int = 1) -> Args:
    batch, groups = draw.size(), draw.one_of(1, 1, 2)
    channels, out = groups * draw.one_of(1, 3), groups * draw.world_size * draw.one_of(1, 2)
    image = draw.numbers(batch, channels, *[6 + n for n in range(num_dims)])
    weight = draw.numbers(out, channels // groups, *[2] * num_dims)
    bias = draw.one_of(None, draw.numbers(out))
    settings = [[stride] * num_dims for stride in (draw.one_of(1, 2), draw.one_of(0, 1), 1)]
    return [image, weight, bias, *settings, groups]


def _any_convolution(draw: Draw) -> Args:
    *args, groups = _convolution(draw, draw.one_of(1, 2, 3))
    return [*args, False, [0] * len(args[3]), groups]


def _convolution_padding(draw: Draw, num_dims: int) -> Args:
    image, weight, bias, stride, _, dilation, groups = _convolution(draw, num_dims)
    return [image, weight, bias, stride, "valid", dilation, groups]


def _convolution_backward(draw: Draw) -> Args:
    args = _any_convolution(draw)
    grad = torch.ops.aten.convolution(*args)
    image, weight, _, *settings = args
    sizes = [len(weight)]
    return [draw.numbers(*grad.shape), image, weight, sizes, *settings, [True] * 3]


def _heads(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the same number of heads."""
    batch, heads, q, k, d = draw.size(), draw.size(), draw.size(), draw.size(), draw.one_of(2, 4)
    shapes = (batch, heads, q, d), (batch, heads, k, d), (batch, heads, k, d)
    return tuple(draw.numbers(*shape) for shape in shapes)  # type: ignore[return-value]


def _attention(draw: Draw) -> Args:
    query, key, value = _heads(draw)
    if draw.one_of(True, False):
        groups = max(1, query.shape[1] // draw.one_of(1, 2, 2 * draw.world_size))
        if query.shape[1] % groups == 0:
            key, value = key[:, :groups].clone(), value[:, :groups].clone()
    scores = (*query.shape[:3], key.shape[2])
    mask = draw.one_of(None, draw.numbers(*draw.narrower(scores)), draw.mask(*scores[2:]))
    causal = mask is None and draw.one_of(True, False)
    if mask is not None and mask.dtype == torch.bool:
        mask[:, 0] = True
    return [query, key, value, mask, 0.0, causal, {"enable_gqa": key.shape != query.shape}]


def _flash(draw: Draw) -> Args:
    query, key, value = _heads(draw)
    return [query, key, value, 0.0, draw.one_of(True, False)]


def _flash_backward(draw: Draw) -> Args:
    args = _flash(draw)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*args)
    return [draw.numbers(*out.shape), *args[:3], out, logsumexp, *args[3:]]


def _embedding(draw: Draw) -> Args:
    rows = 2 * draw.size()
    ids = draw.ids(rows, *draw.shape())
    return [draw.numbers(rows, draw.size()), ids, draw.one_of(-1, 1), draw.one_of(True, False)]


def _embedding_backward(draw: Draw) -> Args:
    table, ids, padding, by_frequency = _embedding(draw)
    grad = draw.numbers(*ids.shape, table.shape[1])
    return [grad, ids, table.shape[0], padding, by_frequency]


def _loss(draw: Draw) -> Args:
    rows, classes = draw.size() + 1, 2 * draw.size()
    target = draw.ids(classes, rows)
    target[0] = draw.one_of(-100, 0)
    return [draw.numbers(rows, classes), target, None, draw.one_of(0, 1, 2), -100]


def _norm(draw: Draw, num_affine: int, eps: bool = True) -> Args:
    shape = draw.shape(2, 4)
    last = shape[draw.one_of(-1, -1, 1) :]
    affine = draw.one_of([None] * num_affine, [draw.numbers(*last) for _ in range(num_affine)])
    return [draw.numbers(*shape), list(last), *affine, *([1e-3] if eps else [])]


def _layer_norm_backward(draw: Draw) -> Args:
    x, last, *_ = _norm(draw, 0)
    weight, bias = draw.numbers(*last), draw.numbers(*last)
    _, mean, rstd = aten.native_layer_norm(x, last, weight, bias, 1e-3)
    return [draw.numbers(*x.shape), x, last, mean, rstd, weight, bias, [True] * 3]


def _rms_norm_backward(draw: Draw) -> Args:
    x, last, weight, eps = _norm(draw, 1)
    _, rstd = aten._fused_rms_norm(x, last, weight, eps)
    return [draw.numbers(*x.shape), x, last, rstd, weight, [True, weight is not None]]


def _reshape(draw: Draw) -> Args:
    """Another way to cut the same elements, perhaps with dims of size 1."""
    shape = draw.shape(1, 4)
    atoms = [f for size in shape for f in draw.one_of([size], _split_size(size, draw.world_size))]
    result, start = [], 0
    while start < len(atoms):
        end = draw.random.randint(start + 1, len(atoms))
        result += [math.prod(atoms[start:end]), *draw.one_of([], [], [1])]
        start = end
    return [draw.numbers(*shape), result]


def _split_size(size: int, world_size: int) -> list[int]:
    return [size // world_size, world_size] if size % world_size == 0 else [size]


def _flatten(draw: Draw) -> Args:
    shape = draw.shape()
    start = draw.random.randrange(len(shape))
    return [draw.numbers(*shape), start, draw.random.randrange(start, len(shape))]


def _unflatten(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return [draw.numbers(*shape), dim, _split_size(shape[dim], draw.world_size)]


def _permute(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.random.sample(range(len(shape)), len(shape))]


def _movedims(draw: Draw) -> Args:
    shape = draw.shape(2)
    pair = [draw.random.sample(range(len(shape)), 2) for _ in range(2)]
    return [draw.numbers(*shape), *pair]


def _movedim(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.dim(len(shape)), draw.dim(len(shape))]


def _unsqueeze(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.dim(len(shape) + 1)]


def _expand(draw: Draw) -> Args:
    shape = draw.shape(1, 4)
    return [draw.numbers(*draw.narrower(shape)), list(shape)]


def _slice(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    start = draw.random.randrange(shape[dim])
    end = draw.random.randrange(start, shape[dim]) + 1
    return [draw.numbers(*shape), dim, start, end, draw.one_of(1, 1, 2)]


def _narrow(draw: Draw) -> Args:
    x, dim, start, end, _ = _slice(draw)
    return [x, dim, start, end - start]


def _select(draw: Draw) -> Args:
    x, dim, start, *_ = _slice(draw)
    return [x, dim, draw.one_of(start, start - x.shape[dim])]


def _slice_backward(draw: Draw) -> Args:
    x, *rest = _slice(draw)
    return [draw.numbers(*aten.slice.Tensor(x, *rest).shape), list(x.shape), *rest]


def _select_backward(draw: Draw) -> Args:
    x, *rest = _select(draw)
    return [draw.numbers(*aten.select.int(x, *rest).shape), list(x.shape), *rest]


def _roll(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.one_of([], [draw.dim(len(shape))])
    return [draw.numbers(*shape), [draw.one_of(1, -2)], dim]


def _split(draw: Draw) -> Args:
    shape = draw.shape()
    dim = draw.dim(len(shape))
    return [draw.numbers(*shape), draw.parts(shape[dim]), dim]


def _cat(draw: Draw) -> Args:
    shape = list(draw.shape())
    dim = draw.dim(len(shape))
    tensors = []
    for _ in range(draw.random.randint(1, 3)):
        shape[dim] = draw.size()
        tensors.append(draw.numbers(*shape))
    return [tensors, dim]


def _cat_with_nothing(draw: Draw) -> Args:
    """``cat`` skips an empty vector, whatever the rank of the others."""
    tensors, dim = _cat(draw)
    return [[*tensors, *draw.one_of([], [draw.numbers(0)])], dim]


def _stack(draw: Draw) -> Args:
    shape = draw.shape()
    return [[draw.numbers(*shape) for _ in range(draw.world_size)], draw.dim(len(shape) + 1)]


def _padding(draw: Draw, shape: Shape) -> list[int]:
    """Some of it negative: with the opposite on the other side the size stays as it is."""
    dims = draw.random.randint(1, len(shape))
    pairs = [draw.one_of((0, 0), (1, 2), (1, -1), (-1, 1)) for _ in range(dims)]
    return [
        number
        for size, pair in zip(reversed(shape), pairs, strict=False)
        for number in (pair if size > 1 else (0, 0))
    ]


def _pad(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), _padding(draw, shape), *draw.one_of([], [0.0], [0.5])]


def _pad_mode(draw: Draw) -> Args:
    mode = draw.one_of("constant", "circular", "replicate")
    if mode == "constant":
        x, padding, *value = _pad(draw)
        return [x, padding, mode, *value]
    return [draw.numbers(draw.size(), draw.size(), 6), [1, 2], mode]


def _indexed(draw: Draw) -> tuple[Shape, list[Any], Shape]:
    """A shape, index tensors for some of its dims, and the shape of what they pick."""
    shape = draw.shape()
    first = draw.random.randrange(len(shape))
    last = draw.random.randrange(first, len(shape)) + 1
    picked = draw.shape(0, 2)
    indices: list[Any] = [None] * first
    indices += [
        draw.ids(shape[dim], *draw.narrower(picked) if picked else ()) for dim in range(first, last)
    ]
    if picked:
        indices[first] = draw.ids(shape[first], *picked)
    return shape, indices, (*shape[:first], *picked, *shape[last:])


def _index(draw: Draw) -> Args:
    shape, indices, _ = _indexed(draw)
    return [draw.numbers(*shape), indices]


def _index_put(draw: Draw) -> Args:
    shape, indices, picked = _indexed(draw)
    values = draw.numbers(*draw.narrower(picked) if picked else ())
    return [draw.numbers(*shape), indices, values, draw.one_of(True, True, False)]


def _complex(draw: Draw) -> Args:
    shape = draw.shape()
    return [torch.complex(draw.numbers(*shape), draw.numbers(*shape))]


def _grouped_product(draw: Draw) -> Args:
    """Rows sorted by expert, a matrix an expert, and where the rows of each end."""
    rows, experts, inner, out = draw.size(), draw.size(), draw.size(), draw.size()
    ends = draw.ids(rows + 1, experts).sort().values
    ends[-1] = rows
    factors = [draw.numbers(rows, inner), draw.numbers(experts, inner, out)]
    return [*factors, ends.to(torch.int32)]


def _grouped_product_backward(draw: Draw) -> Args:
    rows, weight, ends = _grouped_product(draw)
    return [rows, weight, ends, draw.numbers(len(rows), weight.shape[2])]


def _gather(draw: Draw) -> Args:
    """Along one dim as many as it has or another number, of others all or some."""
    shape = draw.shape()
    dim = draw.dim(len(shape))
    picked = [draw.one_of(size, size, max(1, size // 2)) for size in shape]
    picked[dim] = draw.size()
    return [draw.numbers(*shape), dim, draw.ids(shape[dim], *picked)]


def _scatter(draw: Draw) -> Args:
    """Nothing is put at one place twice."""
    shape = draw.shape()
    dim = draw.dim(len(shape))
    picked = [draw.one_of(size, size, max(1, size // 2)) for size in shape]
    order = draw.numbers(*picked[:dim], shape[dim], *(picked[dim:][1:])).argsort(dim)
    index = order.narrow(dim, 0, picked[dim]).contiguous()
    return [draw.numbers(*shape), dim, index, draw.numbers(*picked)]


def _scatter_value(draw: Draw) -> Args:
    return [*_scatter(draw)[:3], draw.one_of(0.0, 0.5)]


def _scatter_reduce(draw: Draw, value: bool = False) -> Args:
    return [*(_scatter_value if value else _scatter)(draw), {"reduce": "multiply"}]


def _slice_scatter(draw: Draw) -> Args:
    x, *rest = _slice(draw)
    return [x, draw.numbers(*aten.slice.Tensor(x, *rest).shape), *rest]


def _select_scatter(draw: Draw) -> Args:
    x, *rest = _select(draw)
    return [x, draw.numbers(*aten.select.int(x, *rest).shape), *rest]


def _masked_fill(draw: Draw) -> Args:
    shape = draw.shape()
    return [draw.numbers(*shape), draw.mask(*draw.narrower(shape)), draw.numbers()]


def _dropout(draw: Draw) -> Args:
    return [draw.numbers(*draw.shape()), torch.tensor(7), 0.3, 5, 0, 1]


class _Turned(torch.autograd.Function):
    """Pointwise in both directions; the backward is not the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y.cos() * factor, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return first * y - second, second * x, None


def _autograd_function(draw: Draw) -> Args:
    shape, spec = draw.shape(), pytree.tree_structure(((None, None, 3.0), {}))
    call = FunctionCall(_Turned, spec, [None, None, 3.0], [0, 1])
    return [[draw.numbers(*shape), draw.numbers(*shape)], number_of(call)]


_CPU_FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
_SPECIAL: dict[str, Callable[[Draw], Args]] = {
    "aten::linear": _linear,
    "aten::mm": lambda draw: _product(draw, ()),
    "aten::bmm": lambda draw: _product(draw, (draw.size(),)),
    "aten::matmul": _matmul,
    "aten::addmm": lambda draw: _added_product(draw, ()),
    "aten::baddbmm": lambda draw: _added_product(draw, (draw.size(),)),
    "aten::convolution": _any_convolution,
    "aten::conv1d": lambda draw: _convolution(draw, 1),
    "aten::conv2d": lambda draw: _convolution(draw, 2),
    "aten::conv3d": lambda draw: _convolution(draw, 3),
    "aten.conv1d.padding": lambda draw: _convolution_padding(draw, 1),
    "aten.conv2d.padding": lambda draw: _convolution_padding(draw, 2),
    "aten.conv3d.padding": lambda draw: _convolution_padding(draw, 3),
    "aten::convolution_backward": _convolution_backward,
    "aten::scaled_dot_product_attention": _attention,
    _CPU_FLASH: _flash,
    f"{_CPU_FLASH}_backward": _flash_backward,
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::cross_entropy_loss": _loss,
    "aten::layer_norm": lambda draw: _norm(draw, 2),
    "aten::native_layer_norm": lambda draw: _norm(draw, 2),
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::rms_norm": lambda draw: _norm(draw, 1),
    "aten::_fused_rms_norm": lambda draw: _norm(draw, 1),
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
    **dict.fromkeys(("aten::reshape", "aten::view", "aten::_unsafe_view"), _reshape),
    "aten.view.dtype": lambda draw: [draw.numbers(*draw.shape()), torch.int64],
    "aten::flatten": _flatten,
    "aten::unflatten": _unflatten,
    "aten::t": lambda draw: [draw.numbers(*draw.shape(1, 2))],
    "aten::permute": _permute,
    "aten.movedim.int": _movedim,
    "aten.movedim.intlist": _movedims,
    "aten::unsqueeze": _unsqueeze,
    "aten::expand": _expand,
    "aten::slice": _slice,
    "aten::narrow": _narrow,
    "aten::select": _select,
    "aten::slice_backward": _slice_backward,
    "aten::select_backward": _select_backward,
    "aten::index_select": lambda draw: [draw.numbers(4, draw.size()), 0, draw.ids(4, 3)],
    "aten::roll": _roll,
    "aten::split_with_sizes": _split,
    "aten::cat": _cat_with_nothing,
    "aten::stack": _stack,
    "aten::constant_pad_nd": _pad,
    "aten::pad": _pad_mode,
    "aten.masked_fill.Tensor": _masked_fill,
    "aten::index": _index,
    "aten::index_put": _index_put,
    "aten::_unsafe_index_put": _index_put,
    "aten::view_as_real": _complex,
    "aten::view_as_complex": lambda draw: [draw.numbers(*draw.shape(), 2)],
    "transformers::grouped_mm_fallback": _grouped_product,
    "transformers::grouped_mm_fallback_backward": _grouped_product_backward,
    "aten::gather": _gather,
    "aten::scatter_add": _scatter,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter_value,
    "aten.scatter.reduce": _scatter_reduce,
    "aten.scatter.value_reduce": lambda draw: _scatter_reduce(draw, value=True),
    "aten::slice_scatter": _slice_scatter,
    "aten::select_scatter": _select_scatter,
    "sp_compiler_function::apply": _autograd_function,
    "sp_compiler::dropout": _dropout,
    "sp_compiler::dropout_mask": _dropout,
}
