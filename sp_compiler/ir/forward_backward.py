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
        name: name of its node.
        kind: ``"activation"`` for results of the forward, else the kind of the region's input.
        num_bytes: size of its storage on one rank.
        module: path of the user's module that computes it, "" for inputs.
        line: line of the user's model, as "file.py:12 code", "" if unknown.
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
        # The others are in memory whether backward reads them or not.
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


BEFORE, BEHIND = "_before", "_behind"
"""Suffixes of the names of values of the previous and of the next call (in forward order), in a
function with values of two calls."""


@dataclass(frozen=True)
class SplitBackward:
    """The backward of an ordinary training step as two functions; the second may run later.

    This is the split of zero-bubble schedules: ``inputs`` computes the gradients that the previous
    call needs (B), ``weights`` the deferred gradients of parameters (W). Such a pipeline schedule
    defers the gradients of all parameters. With ``both``, a call leaves some of its gradients of
    parameters to the call whose backward runs next, the previous one in forward order::

        call 3   inputs(3)
        call 2              both(2, 3)
        call 1                          both(1, 2), weights(1)

    ``both`` owns the values that were computed in backward, or in the forward of its call: the
    caller keeps no reference to them. Their placeholders have ``meta["handed"]``.

    Attributes:
        inputs: placeholders: as those of :attr:`Partitioned.step_backward`; output: one gradient
            (or None) per input of the region, None for deferred ones, then the values that
            ``weights`` needs.
        weights: placeholders: the values that ``inputs`` passes on; output: one gradient (or None)
            per input of the region, None for all but deferred ones.
        both: ``inputs``, and ``weights`` of the next call. Placeholders: the saved tensors, the
            values that the next call passes on, the tangents; output: as that of ``inputs``, with
            the deferred gradients of the next call in place of its own.
    """

    inputs: Graph
    weights: Graph
    both: Graph | None = None

    @property
    def late(self) -> tuple[int, ...]:
        """Indices of the region's inputs whose gradients are deferred."""
        grads = self.weights.output_node().args[0]
        return tuple(index for index, grad in enumerate(grads) if grad is not None)


@dataclass(frozen=True)
class LookAhead:
    """The backward of consecutive calls, each of which recomputes values for the previous call.

    This prefetch of recomputation hides more communication.

    ::

        call 3   recompute(3), both(3, 2)
        call 2                             both(2, 1)
        call 1                                         rest(1)

    A function owns the recomputed values that are passed to it: the caller keeps no reference to
    them. Their placeholders have ``meta["handed"]``.

    Attributes:
        recompute: placeholders: the saved tensors; output: the recomputed values.
        rest: placeholders: the saved tensors, the recomputed values, the tangents; output: that of
            :attr:`Partitioned.backward`.
        both: ``rest``, and ``recompute`` of the previous call. Placeholders: the saved tensors, the
            recomputed values, the saved tensors of the previous call, the tangents; output: that of
            :attr:`Partitioned.backward`, then the recomputed values of the previous call.
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
        loss: the backward from only the model's loss, if the region has the loss and other outputs
            through which a gradient may flow.
        split: the backward of a step as two functions, if a schedule defers weight gradients, or if
            that hides more communication in consecutive calls.
        ahead: the backward of a step for consecutive calls, if that hides more communication.
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
        """The graphs of all functions, by name; the call decides which backwards run."""
        graphs = {"forward": self.forward}
        if self.backward is not None:
            graphs["backward"] = self.backward
        if self.loss is not None:
            graphs["loss_backward"] = self.loss.backward
        if self.split is not None:
            graphs["backward_inputs"] = self.split.inputs
            graphs["backward_weights"] = self.split.weights
            if self.split.both is not None:
                graphs["backward_behind"] = self.split.both
        if self.ahead is not None:
            graphs["recompute"] = self.ahead.recompute
            graphs["backward_rest"] = self.ahead.rest
            graphs["backward_ahead"] = self.ahead.both
        return graphs

    @property
    def step_backward(self) -> Graph | None:
        """The backward of an ordinary training step."""
        # It starts from the loss, if there is one: the general backward would compute with zeros as
        # the gradients of all other outputs.
        return self.backward if self.loss is None else self.loss.backward

    @property
    def trained(self) -> tuple[int, ...]:
        """Positions of the inputs for which an ordinary training step returns a gradient."""
        grads = () if self.step_backward is None else self.step_backward.output_node().args[0]
        return tuple(index for index, grad in enumerate(grads) if grad is not None)

    @property
    def middle_backward(self) -> Graph | None:
        """The backward of an ordinary training step between two calls of the same region."""
        if self.ahead is not None:
            return self.ahead.both
        both = None if self.split is None else self.split.both
        return self.step_backward if both is None else both

    @property
    def sent_to_host(self) -> tuple[int, ...]:
        """Positions of the saved tensors that go to the host."""
        return tuple(i for i, tensor in enumerate(self.saved) if tensor.on_host)

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
    """Return for each call the names of the functions that are its backward in a step.

    Of consecutive calls of a region, the last to run also computes its own deferred gradients.
    """
    calls = program.calls
    # Whether a call has the same region as the previous one; one more entry for the end.
    follows = [
        index > 0 and call.region is calls[index - 1].region for index, call in enumerate(calls)
    ] + [False]
    functions = []
    for index, call in enumerate(calls):
        parts = partitioned[call.region.name]
        is_first, is_last = not follows[index + 1], not follows[index]
        names: tuple[str, ...] = ("backward" if parts.loss is None else "loss_backward",)
        if parts.ahead is not None:
            names = ("backward_rest" if is_last else "backward_ahead",)
            names = ("recompute", *names) if is_first else names
        elif parts.split is not None and parts.split.both is not None:
            names = ("backward_inputs" if is_first else "backward_behind",)
            names = (*names, "backward_weights") if is_last else names
        functions.append(names)
    return functions
