"""Interpretation of graphs node by node: the reference, and a compiled program before code
generation.

Running the graphs after each pass shows which pass changed the results. The code classes have the
interface of :class:`sp_compiler.ir.compiled_program.RegionCode`, so the executor runs them in place
of generated classes, on real or simulated ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from sp_compiler.base.autocast import without_autocast
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import carries_gradient, module_of
from sp_compiler.ir.program import Region
from sp_compiler.ir.symbolic import SizedInterpreter
from sp_compiler.ops.communicator import Communicator, running_on

aten = torch.ops.aten


ONE_RANK = Communicator(None, 0, 1)


@without_autocast()
def run_graph(
    module: GraphModule,
    values: Sequence[Any],
    tp: Communicator = ONE_RANK,
    computed: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Return the outputs of a graph of one rank's tensors; our own operators run on ``tp``.

    ``computed`` is filled with the value of each node, by its name.

    Operators run by torch's dispatcher, with its kernels and gradients, so that comparisons test
    the graph and not a second implementation of operators.
    """
    with running_on(tp):
        return tuple(_Interpreter(module, computed).run(*values))


class _Interpreter(SizedInterpreter):
    """Interpreter that handles two ATen operators of traced graphs that are stricter than their
    originals."""

    def __init__(self, module: GraphModule, computed: dict[str, Any] | None) -> None:
        super().__init__(module)
        self._computed = computed

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        # Stored here, since the interpreter drops a value after its last use.
        if self._computed is not None:
            self._computed[n.name] = result
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.view.default:  # strides may differ from those that were traced
            return args[0].reshape(args[1])
        if target is aten.copy.default:  # it has no derivative
            x, source = args[:2]
            return source.to(x.dtype).expand(x.shape).clone()
        return super().call_function(target, args, kwargs)


class ShardedCode:
    """A sharded region under torch's own autograd.

    Args:
        region: a region after sharding.
        differentiable: whether ``backward`` takes a tangent for each output.

    Attributes:
        uses_autograd: tells the runner not to bypass autograd in operators.
    """

    uses_autograd = True

    def __init__(self, region: Region, differentiable: Sequence[bool]) -> None:
        self._module = region.module
        self._needs_grad = [bool(n.meta.get("requires_grad")) for n in region.placeholders]
        self._differentiable = tuple(differentiable)

    def forward(self, tp: Communicator, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        # The executor runs code without autograd, but the backward of this one is autograd's.
        with torch.enable_grad():
            leaves = [
                value.detach().requires_grad_(needs and carries_gradient(value))
                if isinstance(value, Tensor)
                else value
                for value, needs in zip(inputs, self._needs_grad, strict=True)
            ]
            outputs = run_graph(self._module, leaves, tp)
        return tuple(value.detach() for value in outputs), (_Tape(leaves, outputs),)

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        (tape,) = saved
        flowing = [
            value for value, used in zip(tape.outputs, self._differentiable, strict=True) if used
        ]
        pairs = [pair for pair in zip(flowing, tangents, strict=True) if pair[0].requires_grad]
        wanted = [leaf for leaf in tape.leaves if _is_wanted(leaf)]
        grads = iter(
            torch.autograd.grad(
                [value for value, _ in pairs],
                wanted,
                [tangent for _, tangent in pairs],
                allow_unused=True,
            )
        )
        return tuple(next(grads) if _is_wanted(leaf) else None for leaf in tape.leaves)


def _is_wanted(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


# Compared by identity: equality of lists of tensors would compare elements.
@dataclass(frozen=True, eq=False)
class _Tape:
    leaves: Sequence[Tensor]
    outputs: Sequence[Tensor]


class PartitionedCode:
    """The forward and backward graphs of a region before code generation."""

    def __init__(self, partitioned: Partitioned) -> None:
        self._parts = partitioned

    def forward(self, tp: Communicator, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        module = module_of(self._parts.forward)
        results = run_graph(module, inputs, tp)
        # After the outputs come the values that are saved for backward.
        return results[: self._parts.num_outputs], results[self._parts.num_outputs :]

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        assert self._parts.backward is not None
        return _gradients(self._parts.backward, tp, saved, *tangents)

    def loss_backward(self, tp: Communicator, saved: Any, tangent: Tensor) -> tuple[Any, ...]:
        assert self._parts.loss is not None
        return _gradients(self._parts.loss.backward, tp, saved, tangent)

    def backward_inputs(
        self, tp: Communicator, saved: Any, *tangents: Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        assert self._parts.split is not None
        graph = self._parts.split.inputs
        results = _gradients(graph, tp, saved, *tangents)
        # After the gradients come the values that the second function needs.
        num_handed = len(self._parts.split.weights.find_nodes(op="placeholder"))
        end = len(results) - num_handed
        return results[:end], results[end:]

    def backward_weights(self, tp: Communicator, handed: Sequence[Any]) -> tuple[Any, ...]:
        assert self._parts.split is not None
        return _gradients(self._parts.split.weights, tp, handed)

    def backward_behind(
        self, tp: Communicator, saved: Any, behind: Any, *tangents: Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        assert self._parts.split is not None
        assert self._parts.split.both is not None
        results = _gradients(self._parts.split.both, tp, [*saved, *behind], *tangents)
        # After the gradients come the values for the deferred gradients of this call.
        end = len(results) - len(behind)
        return results[:end], results[end:]

    def recompute(self, tp: Communicator, saved: Any) -> tuple[Any, ...]:
        assert self._parts.ahead is not None
        return _gradients(self._parts.ahead.recompute, tp, saved)

    def backward_rest(
        self, tp: Communicator, saved: Any, recomputed: Any, *tangents: Tensor
    ) -> tuple[Any, ...]:
        assert self._parts.ahead is not None
        return _gradients(self._parts.ahead.rest, tp, [*saved, *recomputed], *tangents)

    def backward_ahead(
        self, tp: Communicator, saved: Any, recomputed: Any, before: Any, *tangents: Tensor
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        assert self._parts.ahead is not None
        given = [*saved, *recomputed, *before]
        results = _gradients(self._parts.ahead.both, tp, given, *tangents)
        # After the gradients come the values recomputed for the previous call.
        end = len(results) - len(recomputed)
        return results[:end], results[end:]


class StepCode:
    """Code whose backward runs all functions that a step may run instead, which must agree.

    An ordinary step runs the backward from only the loss, or functions that also do work for a
    neighbouring call; other steps run the plain ``backward``.

    Args:
        code: code of a region.
        parts: parts of the region; they tell which functions the code has.
        differentiable: whether ``backward`` takes a tangent for each output.

    Attributes:
        forward: that of the code, like all other functions.
    """

    def __init__(self, code: Any, parts: Partitioned, differentiable: Sequence[bool]) -> None:
        self._code, self._parts = code, parts
        loss = parts.loss
        # Index of the loss among the tangents.
        self._loss = None if loss is None else sum(differentiable[: loss.output])
        self.forward = code.forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._code, name)

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        grads = tuple(self._code.backward(tp, saved, *tangents))
        if self._loss is None:
            return _agreeing(grads, self._otherwise(tp, saved, *tangents))
        # A backward is linear: the one from only the loss equals it with zeros for other tangents.
        zeros = [
            tangent if index == self._loss else torch.zeros_like(tangent)
            for index, tangent in enumerate(tangents)
        ]
        of_loss = self._code.backward(tp, saved, *zeros)
        return _agreeing(grads, [self.loss_backward(tp, saved, tangents[self._loss])], of_loss)

    def loss_backward(self, tp: Communicator, saved: Any, tangent: Tensor) -> tuple[Any, ...]:
        grads = tuple(self._code.loss_backward(tp, saved, tangent))
        return _agreeing(grads, self._otherwise(tp, saved, tangent))

    def _otherwise(
        self, tp: Communicator, saved: Any, *tangents: Tensor
    ) -> Iterator[tuple[Any, ...]]:
        """Yield the gradients of the functions for consecutive calls or deferred gradients."""
        code = self._code
        if self._parts.split is not None:
            of_inputs, handed = code.backward_inputs(tp, saved, *tangents)
            if self._parts.split.both is not None:
                # As if the next call (in forward order) were this one.
                yield code.backward_behind(tp, saved, list(handed), *tangents)[0]
            of_weights = code.backward_weights(tp, list(handed))
            # Each input has its gradient from one of the two.
            pairs = zip(of_inputs, of_weights, strict=True)
            yield tuple(second if first is None else first for first, second in pairs)
        if self._parts.ahead is not None:
            values = list(code.recompute(tp, saved))
            # As if the previous call were this one.
            grads, ahead = code.backward_ahead(tp, saved, values, saved, *tangents)
            yield tuple(grads)
            yield tuple(code.backward_rest(tp, saved, list(ahead), *tangents))


def _agreeing(
    grads: Sequence[Any], others: Iterable[Sequence[Any]], same: Sequence[Any] | None = None
) -> tuple[Any, ...]:
    """Return ``grads``, made wrong if one of ``others`` differs from ``same``, by default
    ``grads``: if any of them is wrong, so is the result."""
    same, result = grads if same is None else same, list(grads)
    for other in others:
        for index, (one, another) in enumerate(zip(same, other, strict=True)):
            difference = _difference(one, another)
            if difference is not None:
                left = result[index]
                result[index] = difference if left is None else left + difference
    return tuple(result)


def _difference(one: Tensor | None, another: Tensor | None) -> Tensor | None:
    """Return ``one - another``; a missing gradient counts as zero."""
    if another is None:
        return one
    return -another if one is None else one - another


def _gradients(graph: Graph, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
    module = module_of(graph)
    return run_graph(module, [*saved, *tangents], tp)
