"""A region split into forward and backward, and the tensors saved between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph

from sp_compiler.ir.program import Program, Region


@dataclass(frozen=True)
class SavedTensor:
    """One tensor that forward passes to backward.

    Attributes:
        name: of its node.
        kind: ``"activation"`` for results of the forward, else the kind of the region's input.
        num_bytes: size of its storage on one rank.
        module: path of the user's module that computes it, "" for inputs.
        line: of the user's model, as "file.py:12 code", "" where unknown.
        op: operator that computes it ("linear"), "" for inputs.
        reason: why it is saved.
        on_host: whether it is sent to the host after forward, and fetched for backward.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    module: str
    line: str
    op: str
    reason: str
    on_host: bool = False

    @property
    def is_activation(self) -> bool:
        """Return whether it is an activation, not a parameter, buffer, constant or user input."""
        # Those exist anyway, whether backward reads them or not.
        return self.kind in ("activation", "call")


@dataclass(frozen=True)
class LossPart:
    """Backward of a region where only the model's loss has a tangent.

    Attributes:
        output: index of the region's output that is the loss.
        backward: as :attr:`Partitioned.backward`, with one tangent.
    """

    output: int
    backward: Graph


@dataclass(frozen=True)
class SplitBackward:
    """The backward of an ordinary training step as two functions; the second may be
    delayed.

    Attributes:
        inputs: placeholders: as those of :attr:`Partitioned.step_backward`; output: one gradient
            (or None) per input of the region, None for parameters, then what ``weights`` needs.
        weights: placeholders: the values that ``inputs`` passes on; output: one gradient (or None)
            per input of the region, None for all but parameters.
    """

    inputs: Graph
    weights: Graph


BEFORE = "_before"
"""Behind the names of values of the call before, in a function that has values of two calls."""


@dataclass(frozen=True)
class LookAhead:
    """The backward of calls in a row, in which each recomputes values for the call before it.

    ::

        call 3   recompute(3), both(3, 2)
        call 2                             both(2, 1)
        call 1                                         rest(1)

    Recomputed values that are given to a function are its own: the caller lets them go. Their
    placeholders have ``meta["handed"]``.

    Attributes:
        recompute: placeholders: the saved tensors; output: the recomputed values.
        rest: placeholders: the saved tensors, the recomputed values, the tangents; output: that of
            :attr:`Partitioned.backward`.
        both: ``rest``, and ``recompute`` of the call before. Placeholders: the saved tensors, the
            recomputed values, the saved tensors of the call before, the tangents; output: that of
            :attr:`Partitioned.backward`, then the recomputed values of the call before.
    """

    recompute: Graph
    rest: Graph
    both: Graph


@dataclass(frozen=True)
class Partitioned:
    """Forward and backward of a region.

    Attributes:
        forward: placeholders: the region's inputs; output: the region's outputs, then the saved
            tensors.
        backward: placeholders: the saved tensors, then the tangents; output: one gradient (or None)
            per input. Recomputed nodes have ``meta["recomputed"]``. None if nothing needs a
            gradient.
        saved: saved tensors in the order in which they are passed; each storage once.
        num_outputs: number of the region's outputs.
        loss: the backward from the model's loss alone, if the region has the loss and other outputs
            through which a gradient may flow.
        split: the same as two functions, if a schedule delays weight gradients.
        ahead: the same for calls in a row, if that hides more communication.
    """

    forward: Graph
    backward: Graph | None
    saved: tuple[SavedTensor, ...]
    num_outputs: int
    loss: LossPart | None = None
    split: SplitBackward | None = None
    ahead: LookAhead | None = None

    @property
    def functions(self) -> dict[str, Graph]:
        """The graphs of all functions, by name; which backwards run is known at the call."""
        graphs = {"forward": self.forward}
        if self.backward is not None:
            graphs["backward"] = self.backward
        if self.loss is not None:
            graphs["loss_backward"] = self.loss.backward
        if self.split is not None:
            graphs["backward_inputs"] = self.split.inputs
            graphs["backward_weights"] = self.split.weights
        if self.ahead is not None:
            graphs["recompute"] = self.ahead.recompute
            graphs["backward_rest"] = self.ahead.rest
            graphs["backward_ahead"] = self.ahead.both
        return graphs

    @property
    def step_backward(self) -> Graph | None:
        """The backward of an ordinary training step."""
        # It starts from the loss, where there is one: the general backward would compute with zeros
        # for the gradients of all other outputs.
        return self.backward if self.loss is None else self.loss.backward

    @property
    def kept_bytes(self) -> int:
        """Bytes that one call saves on the device for its backward.

        A value that several calls read (a mask, a rotary table) counts in each of them; a sum over
        a program must count it once.
        """
        return sum(t.num_bytes for t in self.saved if t.is_activation and not t.on_host)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one call sends to the host."""
        return sum(tensor.num_bytes for tensor in self.saved if tensor.on_host)


@dataclass(frozen=True)
class PartitionedRegion:
    """A region with its forward and backward."""

    region: Region
    partitioned: Partitioned


def step_backwards(
    program: Program, partitioned: Mapping[str, Partitioned]
) -> list[tuple[str, ...]]:
    """Return for each call the names of the functions that are its backward in a step."""
    calls = program.calls
    # Whether a call recomputes values for the one before it; one more for the end.
    recomputes = [
        index > 0
        and call.region is calls[index - 1].region
        and partitioned[call.region.name].ahead is not None
        for index, call in enumerate(calls)
    ] + [False]
    functions = []
    for index, call in enumerate(calls):
        from_loss = partitioned[call.region.name].loss is not None
        names: tuple[str, ...] = ("loss_backward" if from_loss else "backward",)
        if recomputes[index] or recomputes[index + 1]:
            names = ("backward_ahead" if recomputes[index] else "backward_rest",)
            names = names if recomputes[index + 1] else ("recompute", *names)
        functions.append(names)
    return functions
