"""Interpretation of graphs node by node: the reference, and a compiled program before code
generation.

Running the graphs after each pass shows which pass changed the numbers. Both classes have the
interface of :class:`sp_compiler.ir.compiled_program.RegionCode`, so the executor runs them in place
of generated classes, on real or simulated ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from sp_compiler.base.autocast import without_autocast
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.fx import carries_gradient
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

    Torch's dispatcher has the kernels and gradients of all operators, so that the comparison tests
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
        # By hand: the interpreter drops a value with its last reader.
        if self._computed is not None:
            self._computed[n.name] = result
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is aten.view.default:  # strides need not be those that were traced
            return args[0].reshape(args[1])
        if target is aten.copy.default:  # which has no derivative
            x, source = args[:2]
            return source.to(x.dtype).expand(x.shape).clone()
        return super().call_function(target, args, kwargs)


class ShardedCode:
    """A sharded region under torch's own autograd.

    Args:
        region: after sharding.
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
        # The executor runs codes without autograd, and this one has no backward but autograd's.
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


# By identity: comparing lists of tensors would compare numbers.
@dataclass(frozen=True, eq=False)
class _Tape:
    leaves: Sequence[Tensor]
    outputs: Sequence[Tensor]


class PartitionedCode:
    """The forward and backward graphs of a region before code generation."""

    def __init__(self, partitioned: Partitioned) -> None:
        self._parts = partitioned

    def forward(self, tp: Communicator, *inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        module = GraphModule(nn.Module(), self._parts.forward)
        results = run_graph(module, inputs, tp)
        # Behind the outputs come the values that are saved for backward.
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
        # Behind the gradients comes what the second function needs.
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
        # Behind the gradients comes what is left to the call before.
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
        # Behind the gradients comes what is recomputed for the call before.
        end = len(results) - len(recomputed)
        return results[:end], results[end:]


class SplitCode:
    """A code whose backward of a step is run as the two functions of a pipeline that delays
    gradients of parameters.

    Attributes:
        forward: that of the code.
    """

    def __init__(self, code: Any) -> None:
        self._code = code
        self.forward = code.forward

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        of_inputs, handed = self._code.backward_inputs(tp, saved, *tangents)
        of_weights = self._code.backward_weights(tp, list(handed))
        # Each input has its gradient from one of the two.
        pairs = zip(of_inputs, of_weights, strict=True)
        return tuple(second if first is None else first for first, second in pairs)


class BehindCode:
    """A code whose functions that leave gradients to the call before all take part in ``backward``.

    Attributes:
        forward: that of the code, as the other functions.
    """

    def __init__(self, code: Any) -> None:
        self.forward, self.backward_inputs = code.forward, code.backward_inputs
        self.backward_weights, self.backward_behind = code.backward_weights, code.backward_behind

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        _, rest = self.backward_inputs(tp, saved, *tangents)
        # As if the call behind were this one.
        grads, _ = self.backward_behind(tp, saved, list(rest), *tangents)
        return _equal_or_wrong(grads, SplitCode(self).backward(tp, saved, *tangents))


class AheadCode:
    """A code whose functions that recompute one call ahead all take part in ``backward``.

    Attributes:
        forward: that of the code, as the other functions.
    """

    def __init__(self, code: Any) -> None:
        self._code = code
        self.forward, self.recompute = code.forward, code.recompute
        self.backward_rest, self.backward_ahead = code.backward_rest, code.backward_ahead

    def backward(self, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
        values = list(self.recompute(tp, saved))
        # As if the call before were this one.
        grads, ahead = self.backward_ahead(tp, saved, values, saved, *tangents)
        same = self.backward_rest(tp, saved, list(ahead), *tangents)
        return _equal_or_wrong(grads, same)


def _equal_or_wrong(grads: Sequence[Any], same: Sequence[Any]) -> tuple[Any, ...]:
    """Return ``grads``, which must be equal to the bit to ``same``, or else the result is wrong as
    well, whichever is."""
    pairs = zip(grads, same, strict=True)
    return tuple(None if first is None else first + (first - second) for first, second in pairs)


def _gradients(graph: Graph, tp: Communicator, saved: Any, *tangents: Tensor) -> tuple[Any, ...]:
    module = GraphModule(nn.Module(), graph)
    return run_graph(module, [*saved, *tangents], tp)
