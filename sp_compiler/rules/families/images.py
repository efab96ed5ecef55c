"""Rules of pooling, resampling, padding and patches of images, and of their gradients."""

from __future__ import annotations

import re

from torch.fx import Node

from sp_compiler.ir.fx import arguments
from sp_compiler.rules.factors import Dims, Factor, OpRule, named, numbered, private
from sp_compiler.rules.registry import (
    FIRST_OPERAND,
    dims_by_name,
    operand_shapes,
    result_shapes,
    result_values,
    rule,
    schema_name,
    shape_of,
)


def _of_ranks(*names: str, ranks: str = "123") -> tuple[str, ...]:
    """``aten::`` names; ``#`` stands for the number of pooled or resampled dims."""
    return tuple(f"aten::{name.replace('#', rank)}" for name in names for rank in ranks)


UPSAMPLE = (
    *_of_ranks("upsample_nearest#d", "_upsample_nearest_exact#d"),
    *("aten::upsample_linear1d", "aten::upsample_bilinear2d", "aten::upsample_trilinear3d"),
    *("aten::upsample_bicubic2d", "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa"),
)
_MAX = (
    *_of_ranks("max_pool#d", "max_pool#d_with_indices", "adaptive_max_pool#d"),
    *_of_ranks("max_pool#d_with_indices_backward", "adaptive_max_pool#d_backward", ranks="23"),
)
_MEAN = (
    *_of_ranks("avg_pool#d", "adaptive_avg_pool#d"),
    *_of_ranks("_adaptive_avg_pool#d", "avg_pool#d_backward", ranks="23"),
    *_of_ranks("_adaptive_avg_pool#d_backward", ranks="23"),
)
PADS = (
    *_of_ranks("reflection_pad#d", "replication_pad#d"),
    *_of_ranks("reflection_pad#d_backward", "replication_pad#d_backward"),
)
POOLS = (*_MAX, *_MEAN)
_SAMPLERS = ("aten::grid_sampler", "aten::grid_sampler_2d", "aten::grid_sampler_3d")
LINEAR = (*_MEAN, *UPSAMPLE, *PADS, *_SAMPLERS, "aten::im2col", "aten::col2im")
"""Those that are linear in the image."""


@rule(
    *(f"{name}_backward" for name in UPSAMPLE),
    local_arguments={"input_size": lambda call: list(call.result_shapes[0])},
)
@rule(*POOLS, *UPSAMPLE, *PADS)
def _resampled(node: Node) -> OpRule:
    """Images of a batch and channels are independent; within an image all dims are mixed."""
    name = schema_name(node)
    found = re.search(r"(\d)d", name)
    assert found is not None
    num_dims = int(found[1])
    shapes, results = operand_shapes(node), result_shapes(node)
    batch = numbered(results[0][:-num_dims])
    operands, made = (
        tuple(
            (*batch, *private(shape[-num_dims:], f"{owner}{index}_"))
            for index, shape in enumerate(side)
        )
        for owner, side in (("o", shapes), ("r", results))
    )
    linear = FIRST_OPERAND if name in LINEAR or name.endswith("_backward") else ()
    # Most of them tell from the number of leading dims whether there is a batch.
    return OpRule(operands, made, linear=linear, rows="fixed")


@rule("aten::im2col", "aten::col2im")
def _patches(node: Node) -> OpRule:
    """``b c h w -> b (c k) l`` and back, with k elements per patch; or without a batch."""
    (shape,), (result,) = operand_shapes(node), result_shapes(node)
    is_cut = schema_name(node) == "aten::im2col"
    image, patches = (shape, result) if is_cut else (result, shape)
    batch, (channels,) = numbered(image[:-3]), named(image[-3:-2], "c")
    elements = private((patches[-2] // image[-3],), "k")[0]
    of_image = (*batch, channels, *private(image[-2:], "x"))
    of_patches = (*batch, (*channels, *elements), *private(patches[-1:], "l"))
    operand, made = (of_image, of_patches) if is_cut else (of_patches, of_image)
    return OpRule((operand,), (made,), linear=FIRST_OPERAND, rows="fixed")


@rule(*_SAMPLERS, *_of_ranks("grid_sampler_#d_backward", ranks="23"))
def _sampled(node: Node) -> OpRule:
    """Images ``b c ...`` at the points ``b ... 2``, which all channels share.

    Results of the backward: the gradients of the images and of the points.
    """
    args = arguments(node)
    batch, channels = named(shape_of(args["input"])[:2], "bc")

    def dims(name: str, operand: Node) -> Dims:
        return of(name, shape_of(operand))

    def of(name: str, shape: tuple[int, ...]) -> Dims:
        inner: tuple[tuple[Factor, ...], ...] = () if name == "grid" else (channels,)
        return (batch, *inner, *private(shape[1 + len(inner) :], name))

    operands = dims_by_name(node, dims)
    if "grad_output" not in args:
        made = of("output", result_shapes(node)[0])
        return OpRule(operands, (made,), linear=FIRST_OPERAND, rows="fixed")
    results = tuple(
        of(name, shape_of(args[name]))
        for name, value in zip(("input", "grid"), result_values(node), strict=True)
        if value is not None
    )
    return OpRule(operands, results, contracted=channels, linear=FIRST_OPERAND, rows="fixed")
