"""Random values for parameters that have no values yet, and for values that depend on them."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from sp_compiler.ir.fx import ancestors, carries_gradient
from sp_compiler.ir.program import Program, Ref, Region
from sp_compiler.verification.interpret import run_graph
from sp_compiler.verification.precision import widest

Spread = Literal["any sign", "positive", "fraction"]
SPREADS: tuple[Spread, ...] = ("any sign", "positive", "fraction")
"""In the order to try them: roots and logarithms of parameters need the second or the third, since
a comparison of NaN with NaN would prove nothing."""
_SEED = 20260
# A large table repeats its first values, since drawing all of them costs more than a matmul with
# them. The period is a prime, so that parts on two ranks, or rows of a usual width, are not equal.
_PERIOD = 262_139


def random_like(
    value: Tensor,
    generator: torch.Generator,
    device: torch.device | None = None,
    spread: Spread = "any sign",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return random numbers, scaled so that results of matmuls stay of order one.

    ``value`` gives the shape; if its dtype has no gradients, the result is zero. Without ``dtype``
    the result is float64.
    """
    shape, device = tuple(value.shape), device or value.device
    if not carries_gradient(value):
        return torch.zeros(shape, dtype=value.dtype, device=device)
    # Always drawn on the CPU: generators of two devices draw different numbers.
    size = math.prod(shape)
    dtype_drawn = widest(value.dtype)
    noise = torch.randn(min(size, _PERIOD), generator=generator, dtype=dtype_drawn, device="cpu")
    if spread != "any sign" and not noise.is_complex():
        noise = noise.abs()
    if spread == "fraction" and not noise.is_complex():
        noise = noise / (1 + noise)
    # By the fan-in of a weight, at most 64: otherwise narrow results of wide tables would vanish.
    scale = 1 / math.sqrt(min(shape[-1], 64)) if len(shape) == 2 else 1.0
    noise = (noise * scale).to(dtype or noise.dtype)
    noise = noise.repeat(-(-size // _PERIOD))[:size].reshape(shape)
    return noise.to(device).requires_grad_()


class Values:
    """The value of every ref of a program at the example's sizes, computed on demand.

    Values that depend on a parameter are random, so that no layer has to run before another. All
    other values (masks, positions, rotary tables) are computed by the program, because passes may
    rely on them.

    Random values are kept until :meth:`forget`, so that all comparisons of a block get the same
    tensors.

    Args:
        program: the program at the example's sizes.
        params: for shapes, dtypes and which require gradients; their values are not used.
        buffers: buffers by name; random if they have no memory.
        inputs: flattened user inputs.
        spread: spread of random numbers.
    """

    def __init__(
        self,
        program: Program,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Any],
        spread: Spread,
    ) -> None:
        self._program = program
        self._named = {"param": params, "buffer": buffers, "constant": program.constants}
        self._inputs = inputs
        self._spread = spread
        self._results: dict[int, tuple[Any, ...]] = {}
        self._kept: dict[tuple[str, Ref], Tensor] = {}

    def forget(self) -> None:
        """Free the random values and tangents; equal ones are drawn again when needed."""
        self._kept.clear()

    def of(self, ref: Ref) -> Any:
        """Return the value of ``ref``."""
        if ref.kind == "seed":
            return torch.tensor(_SEED, device="cpu")
        if ref.kind == "size":
            return int(self._inputs[ref.index].shape[ref.output])
        if ref.kind == "call":
            node = self._program.node_of(ref)
            value = node.meta["val"]
            # Integers that depend on parameters, such as the index of an expert, are computed:
            # random ones would be out of range.
            if self.is_random(ref) and carries_gradient(value):
                return self._random(ref, value, bool(node.meta.get("requires_grad")))
            return self._result(ref)
        value = self._source(ref)
        return self._random(ref, value, value.requires_grad) if self.is_random(ref) else value

    def random(self, ref: Ref, like: Tensor) -> Tensor:
        """Return random numbers for ``ref``, in the shape of ``like``."""
        return self._drawn("value", ref, like, like.dtype)

    def tangent(self, ref: Ref, like: Tensor) -> Tensor:
        """Return the float64 tangent of the output ``ref`` of a call, in the shape of ``like``."""
        return self._drawn("tangent", ref, like)

    def is_random(self, ref: Ref) -> bool:
        """Return whether ``ref`` depends on a parameter or on a tensor without memory."""
        if ref.kind == "call":
            return self._dependent[ref]
        if ref.kind in ("seed", "size"):
            return False
        value = self._source(ref)
        return ref.kind == "param" or (isinstance(value, Tensor) and value.is_meta)

    def identity(self, ref: Ref) -> object:
        """Return what two refs must share for one proof to hold for both: if random, only the
        shape, dtype and whether a gradient is required."""
        if ref.kind == "seed":  # all calls of a proof draw from one seed
            return ref.kind
        if ref.kind == "size":
            return ref
        if ref.kind == "call":
            node = self._program.node_of(ref)
            like, requires_grad = node.meta["val"], bool(node.meta.get("requires_grad"))
        else:
            like = self._source(ref)
            requires_grad = isinstance(like, Tensor) and like.requires_grad
        if isinstance(like, Tensor) and self.is_random(ref) and carries_gradient(like):
            # Equal layers have different weights; a proof on random ones holds for all layers.
            return tuple(like.shape), like.dtype, requires_grad
        if ref.kind in ("buffer", "constant") and not like.is_meta:
            # Each layer may have its own table, with the same content in all of them.
            content = like.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            return like.shape, like.dtype, hashlib.sha256(content).hexdigest()
        return ref

    def _source(self, ref: Ref) -> Any:
        if ref.kind == "input":
            return self._inputs[ref.index]
        return self._named[ref.kind][ref.name]

    @cached_property
    def _dependent(self) -> dict[Ref, bool]:
        reaching: dict[int, list[set[int]]] = {}
        dependent: dict[Ref, bool] = {}
        for index, call in enumerate(self._program.calls):
            if id(call.region) not in reaching:
                reaching[id(call.region)] = _reaching_inputs(call.region)
            for output, positions in enumerate(reaching[id(call.region)]):
                known = (
                    dependent[arg] if arg.kind == "call" else self.is_random(arg)
                    for arg in (call.args[position] for position in positions)
                )
                dependent[Ref("call", index=index, output=output)] = any(known)
        return dependent

    def _random(self, ref: Ref, like: Tensor, requires_grad: bool) -> Tensor:
        value = self.random(ref, like).detach()
        return value.requires_grad_(requires_grad and carries_gradient(value))

    def _drawn(self, kind: str, ref: Ref, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if (kind, ref) not in self._kept:
            # Seeded by name: the numbers depend neither on the order of use nor on the process.
            text = repr((kind, ref.kind, ref.name, ref.index, ref.output))
            generator = torch.Generator().manual_seed(zlib.crc32(text.encode()))
            # A meta tensor does not tell its later device.
            device = torch.device("cpu") if like.is_meta else like.device
            spread: Spread = self._spread if kind == "value" else "any sign"
            drawn = random_like(like, generator, device, spread, dtype)
            self._kept[kind, ref] = drawn.detach()
        return self._kept[kind, ref]

    def _result(self, ref: Ref) -> Any:
        if ref.index not in self._results:
            call = self._program.calls[ref.index]
            with torch.no_grad():
                args = [self.of(arg) for arg in call.args]
                self._results[ref.index] = run_graph(call.region.module, args)
        return self._results[ref.index][ref.output]


def _reaching_inputs(region: Region) -> list[set[int]]:
    """Return for each output the positions of the placeholders that it depends on."""
    positions = {node: index for index, node in enumerate(region.placeholders)}
    return [
        {positions[node] for node in ancestors([output]) & positions.keys()}
        for output in region.outputs
    ]
