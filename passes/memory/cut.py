"""From a tagged joint graph to the forward and backward that run: cut apart, then overlapped."""

from __future__ import annotations

from dataclasses import dataclass

from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.symbolic import Sizes
from sp_compiler.passes.memory.partition import partition
from sp_compiler.passes.overlap import overlap_backward
from sp_compiler.trace.joint import JointGraph


@dataclass(frozen=True)
class Cut:
    """What the program wants of a region's forward and backward.

    Attributes:
        loss_output: the output that is the model's loss, see
            :func:`sp_compiler.passes.memory.partition.partition`.
        own_parameters: see :meth:`sp_compiler.ir.program.Program.own_parameters`.
        overlap: whether backward works while collectives are on their way.
        sizes: what the program leaves open.
    """

    loss_output: int | None = None
    own_parameters: frozenset[int] = frozenset()
    overlap: bool = False
    sizes: Sizes | None = None


def cut(joint: JointGraph, how: Cut) -> Partitioned:
    """Cut ``joint``, which is tagged and left as it is."""
    parts = partition(joint, how.loss_output)
    return overlap_backward(parts, how.own_parameters, how.sizes) if how.overlap else parts
