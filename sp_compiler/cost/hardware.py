"""Roofline and alpha-beta model of one accelerator and its tensor-parallel link.

Only ratios matter to the decisions; the numbers are those of an H100 SXM.
"""

from __future__ import annotations

from dataclasses import dataclass

from sp_compiler.base.placement import Placement
from sp_compiler.ops.convert import conversion_between


@dataclass(frozen=True)
class Hardware:
    """Rates per microsecond.

    Attributes:
        name: of the accelerator.
        flops_per_us: dense bf16 matrix rate that is usual in practice, half of the peak.
        peak_flops_per_us: dense bf16 matrix rate (H100 data sheet: 989 TFLOP/s), the base of MFU.
        memory_bytes_per_us: memory bandwidth (H100 data sheet: 3.35 TB/s).
        link_bytes_per_us: one direction of NVLink 4 (data sheet: 900 GB/s both directions).
        latency_us: fixed time of one collective.
        replicated_byte_us: price of a byte of the largest matrix if every rank holds it; of
            others in proportion to their size. Chosen so that a weight matrix is sharded whenever
            it can be, while a small adapter is not worth a collective.
        kept_byte_us: price of a byte kept for backward between two regions. Chosen so that rows are
            sharded where gathering them costs the same either way, while a value that several
            layers read in full (an encoder's states) is gathered once.
    """

    name: str = "H100 SXM"
    flops_per_us: float = 500e6
    peak_flops_per_us: float = 989e6
    memory_bytes_per_us: float = 3.35e6
    link_bytes_per_us: float = 450e3
    latency_us: float = 2.0
    replicated_byte_us: float = 1e-2
    kept_byte_us: float = 1e-5


H100 = Hardware()


def collective_us(
    num_bytes: float, times: int, world_size: int, hardware: Hardware = H100
) -> float:
    """Time of a collective over a full value of ``num_bytes`` that crosses the link ``times``.

    An all-gather or reduce-scatter crosses it once, an all-reduce, which is both, twice.
    """
    if times == 0 or world_size == 1:
        return 0.0
    # A ring: every rank sends and receives all parts but its own.
    wire_bytes = num_bytes * times * (world_size - 1) / world_size
    return hardware.latency_us * times + wire_bytes / hardware.link_bytes_per_us


def conversion_us(
    num_bytes: float, source: Placement, target: Placement, world_size: int, *, needs_grad: bool
) -> float | None:
    """Time of a conversion and of its gradient.

    ``None`` for a conversion that the typing does not have (nothing turns R into I).
    """
    if source.is_sharded and target.is_sharded:
        # By way of the full value: gathered and cut, in forward and in backward.
        gather_us = conversion_us(
            num_bytes, source, Placement("I"), world_size, needs_grad=needs_grad
        )
        cut_us = conversion_us(num_bytes, Placement("I"), target, world_size, needs_grad=needs_grad)
        return (gather_us or 0.0) + (cut_us or 0.0)
    forward = conversion_between(source, target)
    if forward is None or not forward.offered:
        return None
    total = collective_us(num_bytes, forward.link_crossings, world_size)
    if needs_grad:
        backward = conversion_between(target.dual, source.dual)
        assert backward is not None  # of every conversion that is offered there is a gradient
        total += collective_us(num_bytes, backward.link_crossings, world_size)
    # Collectives work on dim 0: parts of an inner dim, or of segments, are copied into place.
    # Read and written, in forward and in backward, are four times the bytes.
    inner = any(p.kind == "S" and (p.dim or p.segments) for p in (source, target))
    copies = 4.0 if inner else 0.0
    return total + copies * num_bytes / H100.memory_bytes_per_us


def operator_us(flops: float, num_bytes: float, hardware: Hardware = H100) -> float:
    """Roofline time of forward and backward of one operator on one rank."""
    # The backward of a matrix product is two products of the same size, one per factor.
    return 3 * kernel_us(flops, num_bytes, hardware)


def kernel_us(flops: float, num_bytes: float, hardware: Hardware = H100) -> float:
    """Roofline time of one kernel that does ``flops`` and moves ``num_bytes`` of memory."""
    return max(flops / hardware.flops_per_us, num_bytes / hardware.memory_bytes_per_us)
