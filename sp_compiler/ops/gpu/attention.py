"""Attention with dropout by FlexAttention, whose kernels never write scores to memory.

FlexAttention modifies scores before its softmax, and dropout applies to what the softmax returns.
With M, 0 or 1, for what survives, a softmax of ``s + log(M / (1 - p))`` has the right numerators,
but only the sum of those that survive as its denominator. So forward takes two calls::

    context', lse' = flex(s + log(M / (1 - p)))          lse = flex(s) of a few columns of values
    context = context' * exp(lse' - lse)

Backward takes one. Its kernel is given ``lse`` instead of ``lse'``: then what it takes for the
probabilities, ``W = exp(s + log(M / (1 - p)) - lse)``, is what multiplies the values. With
``delta = sum(grad * context)`` of a row and P the probabilities before dropout::

    grad_s = W * (grad @ v^T) - P * delta
           = W * (grad @ v^T - (1 - p) * delta)          where M is 1: P = (1 - p) * W
           = -exp(s - lse) * delta                       where M is 0: W = 0

The kernel computes the first, given ``(1 - p) * delta``, and our derivative of the modified scores
the second.

The softmax is that of FlashAttention-2 (Dao 2023, arXiv 2307.08691); FlexAttention is described in
Dong et al. 2024, arXiv 2412.05496.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler.ops.counter import Grid, bits_of, in_memory
from sp_compiler.ops.dropout import threshold_of

# Side of the blocks of scores; a block is skipped if the mask forbids all of it.
_BLOCK = 128
# Without a mask one block is everything: FlexAttention's own value for that.
_EVERYTHING = 1 << 30
# The kernels need some columns of values, though nothing reads the output of the second call.
_FEW_COLUMNS = 16
_LOG2_E = math.log2(math.e)
# What torch's own function passes to the kernels; only the first two are our choices.
_OPTIONS = {
    "BACKEND": "TRITON",
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
}
# Scores that a program computes at a time: queries (M) x keys (N) in forward; in backward those of
# the gradients of keys and values (M1 x N1) and of queries (M2 x N2). The bits of dropout take
# registers, so that smaller blocks than PyTorch's own choice are faster (docs/gpu.md).
_TILED_OPTIONS = {
    **_OPTIONS,
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 32,
    "bwd_num_warps": 4, "bwd_num_stages": 3,
}  # fmt: skip
# Only where that was measured: for wider heads the blocks would not fit on a multiprocessor.
_TILED_CAPABILITY, _TILED_WIDTHS = (9, 0), range(64, 129)
_SETTINGS = {
    # The kernels assume that values per row, and lists of blocks, are contiguous over all heads;
    # Inductor would pad between heads.
    "comprehensive_padding": False,
    # Code that records steps records these kernels with them.
    "triton.cudagraphs": False,
}
# An index of the kernels has 32 bits if their factors have no more elements than this.
_MAX_INT32 = (1 << 31) - 1


class Place(NamedTuple):
    """What a kernel is compiled for, in addition to the layouts of its tensors; see
    :func:`~sp_compiler.ops.attention.dropout_attention`."""

    rank: int
    scale: float
    p: float
    dim: int
    world_size: int
    first_row: int
    padding: int


class Given(NamedTuple):
    """The tensors of a call.

    Attributes:
        site: 0-dim int64, so that equal layers of a model share one kernel.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    seed: Tensor | None
    site: Tensor
    grad: Tensor | None = None
    context: Tensor | None = None
    logsumexp: Tensor | None = None


def forward(
    rank: int, tensors: Sequence[Tensor | None], scale: float, p: float, site: int, *where: int
) -> tuple[Tensor, Tensor] | None:
    """Run :func:`~sp_compiler.ops.attention.dropout_attention`; ``None`` if no kernel can.

    Args:
        rank: this rank.
        tensors: the operator's tensors, in its order.
        scale, p, site: as for the operator.
        where: its other arguments.
    """
    made = _run(compute, _given(tensors, site), Place(rank, scale, p, *where))
    return None if made is None else (made[0], made[1])


def backward(
    rank: int,
    made: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    scale: float,
    p: float,
    site: int,
    *where: int,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run :func:`~sp_compiler.ops.attention.dropout_attention_backward`; as :func:`forward`.

    Args:
        made: the gradient, the context and the logsumexp.
    """
    given = _given(tensors, site, *made)
    grads = _run(differentiate, given, Place(rank, scale, p, *where))
    return None if grads is None else (grads[0], grads[1], grads[2])


def _given(tensors: Sequence[Tensor | None], site: int, *made: Tensor) -> Given:
    query, key, value, mask, seed = tensors
    assert query is not None
    assert key is not None
    assert value is not None
    return Given(query, key, value, mask, seed, _on_device(site, query), *made)


def _on_device(site: int, like: Tensor) -> Tensor:
    # Filled on the device: a copy from the host would not be recorded in a CUDA graph.
    return torch.full((), site, dtype=torch.int64, device=like.device)


def compute(given: Given, place: Place) -> list[Tensor]:
    """Return the context and the logsumexp; what Inductor compiles for forward."""
    query, key, value = given[:3]
    (block_mask, mask), scores = _block_mask(given), _Scores(given, place)
    call: Any = functools.partial(
        flex_attention,
        scale=place.scale,
        kernel_options=_options(given),
        mask_mod_other_buffers=mask,
    )
    plain = scores.plain, block_mask
    if given.seed is None:
        context, lse, *_ = call(query, key, value, *plain)
        return [_queries_first(context), lse / _LOG2_E]
    changed = scores.dropped, block_mask
    dropped, lse_dropped, *_ = call(
        query, key, value, *changed, score_mod_other_buffers=scores.keys
    )
    few = value[..., :_FEW_COLUMNS]
    _, lse, *_ = call(query, key, few, *plain)
    # 0 for a row in which nothing survives, and not NaN if it had no key at all.
    share = torch.where(lse_dropped == -math.inf, 0.0, torch.exp2(lse_dropped - lse))
    context = (dropped.to(share.dtype) * share.unsqueeze(-1)).to(dropped.dtype)
    return [_queries_first(context), lse / _LOG2_E]


def differentiate(given: Given, place: Place) -> list[Tensor]:
    """Return the gradients of query, key and value; what Inductor compiles for backward."""
    grad, context, logsumexp = given[-3:]
    assert grad is not None
    assert context is not None
    assert logsumexp is not None
    (block_mask, mask), scores = _block_mask(given), _Scores(given, place)
    lse = logsumexp * _LOG2_E
    changed: tuple[Any, ...] = (scores.plain, scores.plain_derivative)
    buffers: tuple[Tensor, ...] = ()
    # Zeros if there is none: not every torch version takes None.
    grad_lse = torch.zeros_like(lse)
    if given.seed is not None:
        delta = (grad.to(lse.dtype) * context).sum(-1)
        changed = scores.dropped, scores.dropped_derivative
        # As in the kernel itself: for a row without any key there is nothing to subtract.
        finite = torch.where(logsumexp == -math.inf, 0.0, logsumexp)
        buffers = (*scores.keys, in_memory(finite), in_memory(delta))
        # The kernel subtracts the gradient of the logsumexp, times log 2, from ``delta``.
        grad_lse = place.p * delta / _LOG2_E
    given_to_kernel: tuple[Any, ...] = (
        *given[:3], context, lse, grad, grad_lse, *changed, block_mask,
        place.scale, _options(given), buffers, mask,
    )  # fmt: skip
    return [_queries_first(x) for x in flex_attention_backward(*given_to_kernel)[:3]]


def _options(given: Given) -> dict[str, Any]:
    """Return FlexAttention's options for a call."""
    query = given.query
    is_measured = (
        given.seed is not None
        and query.is_cuda
        and query.element_size() == 2
        and all(factor.shape[-1] in _TILED_WIDTHS for factor in (query, given.value))
        and torch.version.hip is None  # some AMD GPUs have the same number
        and torch.cuda.get_device_capability(query.device) == _TILED_CAPABILITY
    )
    return _TILED_OPTIONS if is_measured else _OPTIONS


class _Scores:
    """How a score changes before the softmax; methods get it and its position in (b, a, s, l).

    Attributes:
        keys: keys of the rows and columns of a dropout mask; empty without one.
    """

    def __init__(self, given: Given, place: Place) -> None:
        self._place = place
        self._threshold = threshold_of(place.p)
        self.keys: tuple[Tensor, ...] = ()
        if given.seed is not None:
            *rows, _ = given.query.shape
            shape, (rank, _, _, *where) = (*rows, given.key.shape[-2]), place
            dim, world_size, first_row, padding = where
            grid = Grid(
                shape, given.query.device, given.seed, given.site, dim, world_size, rank,
                first_row, padding,
            )  # fmt: skip
            # In memory: the kernel reads them from there, whatever computes them.
            self.keys = (
                in_memory(grid.low.view(rows)),
                in_memory(grid.high.view(rows)),
                in_memory(grid.columns.view(-1)),
            )

    def plain(self, score: Tensor, *rest: Tensor) -> Tensor:
        return score

    def plain_derivative(self, score: Tensor, *rest: Tensor) -> list[Tensor | None]:
        grad, *buffers = rest[4:]
        return [grad, *[None] * (4 + len(buffers))]

    def dropped(self, score: Tensor, *rest: Tensor) -> Tensor:
        place, keys = rest[:4], rest[4:7]
        survives, score = self._survives(place, keys), score - math.log1p(-self._place.p)
        return torch.where(survives, score, score.new_full((), -math.inf))

    def dropped_derivative(self, score: Tensor, *rest: Tensor) -> list[Tensor | None]:
        place, (grad, *buffers) = rest[:4], rest[4:]
        *keys, lse, delta = buffers
        probability = torch.exp(score - lse[place[:3]])
        changed = torch.where(self._survives(place, keys), grad, -probability * delta[place[:3]])
        return [changed, *[None] * (4 + len(buffers))]

    def _survives(self, place: tuple[Tensor, ...], keys: Sequence[Tensor]) -> Tensor:
        low, high, columns = keys
        return bits_of(low[place[:3]], high[place[:3]], columns[place[3]]) >= self._threshold


def _block_mask(given: Given) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """Return FlexAttention's form of the mask, and the tensors that it reads."""
    rows, columns = given.query.shape[-2], given.key.shape[-2]
    device = given.query.device
    if given.mask is None:
        number = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
        index = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
        listed = number, index, None, None, number, index, None, None
        everything = BlockMask((rows, columns), *listed, (_EVERYTHING, _EVERYTHING), _all)
        return everything.as_tuple(), ()
    # Without dims of size 1, along which it is broadcast.
    mask, dims = given.mask.squeeze(), [i for i, size in enumerate(given.mask.shape) if size != 1]

    # The kernels choose the width of indices by their factors; a mask may be larger than these.
    is_large = mask.numel() > _MAX_INT32

    def allowed(*place_and_mask: Tensor) -> Tensor:
        *place, mask = place_and_mask
        return mask[tuple(place[dim].long() if is_large else place[dim] for dim in dims)]

    wide = given.mask.expand(*given.mask.shape[:2], rows, columns)
    wide = torch.nn.functional.pad(wide, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    counts = wide.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK)).sum((-3, -1))
    # Blocks in which the mask forbids nothing are computed without reading it.
    full = counts == _BLOCK * _BLOCK
    part = (counts > 0) & ~full
    across = (*_listed(part.mT), *_listed(full.mT))
    blocks = BlockMask(
        (rows, columns), *_listed(part), *_listed(full), *across, (_BLOCK, _BLOCK), allowed
    )
    return blocks.as_tuple(), (mask,)


def _all(sample: Tensor, *rest: Tensor) -> Tensor:
    return sample.new_ones((), dtype=torch.bool)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row of a grid of blocks how many are marked, and their indices first."""
    marks = blocks.to(torch.int32)
    order = marks.argsort(dim=-1, descending=True, stable=True)
    return marks.sum(-1).to(torch.int32), order.to(torch.int32)


def _queries_first(x: Tensor) -> Tensor:
    by_queries = x.transpose(1, 2)
    return x if by_queries.is_contiguous() else by_queries.contiguous().transpose(1, 2)


Function = Callable[[Given, Place], list[Tensor]]
_Compiled = Callable[..., Sequence[Tensor]]
_COMPILED: dict[Any, _Compiled | None] = {}
"""By function, place and layouts; ``None`` if PyTorch could not compile."""


def _run(function: Function, given: Given, place: Place) -> Sequence[Tensor] | None:
    """Run a function compiled by Inductor; ``None`` if it cannot be compiled."""
    # The kernels need the elements of a row to be contiguous.
    in_order = [
        x if x is None or x.dim() < 4 or x.stride(-1) == 1 else x.contiguous() for x in given
    ]
    given = Given(*in_order)  # type: ignore[arg-type]
    present = tuple(x for x in given if x is not None)
    layouts = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given)
    # Matmuls of float32 are compiled for one precision.
    key = function, place, layouts, _float32_precision()
    if key in _COMPILED:
        compiled = _COMPILED[key]
        return None if compiled is None else compiled(*present)
    try:
        # A mode of the caller, such as one that counts operations, would see the fake tensors.
        with _disable_current_modes():
            compiled = compile_for(function, given, place)
        made = compiled(*present)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"attention of {list(given.query.shape)} on {given.query.device} runs with its scores "
            f"in memory: PyTorch could not compile FlexAttention for it: {error}",
            stacklevel=2,
        )
        _COMPILED[key] = None
        return None
    _COMPILED[key] = compiled
    return made


def _float32_precision() -> str:
    # Torch's older function raises an error if the newer setting differs from it.
    newer = torch.backends.cuda.matmul.fp32_precision
    return torch.get_float32_matmul_precision() if newer == "none" else newer


def compile_for(function: Function, given: Given, place: Place) -> _Compiled:
    """Let Inductor compile :func:`compute` or :func:`differentiate` for tensors like these.

    The compiled function takes the tensors that are not ``None``, in their order.
    """
    return compile_graph(*trace_for(function, given, place))


def compile_graph(module: GraphModule, fakes: Sequence[Tensor]) -> _Compiled:
    """Let Inductor compile the graph of a function, which was traced with ``fakes``."""
    compiled: _Compiled = torch._inductor.compile(module, [*fakes], options=_SETTINGS)
    return compiled


def trace_for(function: Function, given: Given, place: Place) -> tuple[GraphModule, list[Tensor]]:
    """Return the graph of a function, and the fake tensors that it was traced with."""
    has = tuple(x is not None for x in given)

    def flat(*present: Tensor) -> list[Tensor]:
        values: Iterator[Tensor] = iter(present)
        return function(Given(*[next(values) if each else None for each in has]), place)  # type: ignore[arg-type]

    mode = FakeTensorMode()
    # Detached: if two arguments are one tensor, the graph would read one for both, also in a call
    # where they are two.
    fakes = [mode.from_tensor(x).detach() for x in given if x is not None]
    with mode, torch.no_grad():
        return make_fx(flat)(*fakes), fakes
