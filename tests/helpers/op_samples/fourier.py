"""Calls of Fourier transforms."""

from __future__ import annotations

import torch

from tests.helpers.op_samples.draw import Args, Draw, Sample
from tests.helpers.torch_versions import FAKE_TRANSFORMS_NEED_ORDER

aten = torch.ops.aten


def _transform(draw: Draw, form: str) -> Args:
    """Of complex numbers or of real ones, along one dim or several, of some or all sizes."""
    shape = draw.shape(2, 3)
    x = draw.numbers(*shape)
    if form not in ("rfft", "ihfft", "rfft2", "rfftn"):
        x = torch.complex(x, draw.numbers(*shape))
    # What a single complex number is the half of has no real number at all.
    to_reals = form in ("irfft", "hfft", "irfft2", "irfftn")
    if form[-1] not in "2n":
        size = 8 if to_reals else draw.one_of(None, 3, 8)
        return [x, size, draw.dim(len(shape)), draw.one_of(None, "ortho")]
    sizes = [4, 6] if to_reals else draw.one_of(None, [4, 6])
    if form[-1] == "n" and draw.one_of(True, False):
        return [x, sizes, None]
    last = [0, -1] if FAKE_TRANSFORMS_NEED_ORDER else [-1, 0]
    return [x, sizes, draw.one_of([-2, -1], last)]


def _primitive(draw: Draw) -> tuple[torch.Tensor, list[int]]:
    shape = draw.shape(1, 3)
    return draw.numbers(*shape), [dim % len(shape) for dim in draw.subset(len(shape))]


def _of_reals(draw: Draw) -> Args:
    x, dims = _primitive(draw)
    return [x, dims, draw.one_of(0, 1, 2), draw.one_of(True, False)]


def _of_complex(draw: Draw) -> Args:
    x, dims = _primitive(draw)
    return [torch.complex(x, x.flip(0)), dims, draw.one_of(0, 1, 2), draw.one_of(True, False)]


def _to_reals(draw: Draw) -> Args:
    x, dims = _primitive(draw)
    size = x.shape[dims[-1]]
    spectrum = aten._fft_r2c(x, dims, 0, True)
    return [spectrum, dims, draw.one_of(0, 1, 2), size]


def _named(form: str) -> Sample:
    return lambda draw: _transform(draw, form)


_FORMS = (
    *("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2"),
    *("fftn", "ifftn", "rfftn", "irfftn"),
)
SAMPLES: dict[str, Sample] = {
    **{f"aten::fft_{form}": _named(form) for form in _FORMS},
    "aten::_fft_r2c": _of_reals,
    "aten::_fft_c2c": _of_complex,
    "aten::_fft_c2r": _to_reals,
}
