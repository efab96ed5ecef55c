"""Bytes that one call needs while it runs, in addition to what calls save for backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from torch.fx import Graph, Node

from sp_compiler.cost.memory import function_peak_bytes, owned_bytes
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.op_traits import base


@dataclass(frozen=True)
class CallMemory:
    """Peak bytes of a call in each of its functions.

    Gradients of parameters count: from the second microbatch on they exist in addition to their
    sum.

    Attributes:
        forward_bytes: peak in forward, with the values that it takes from other calls.
        backward_bytes: peak in backward, with the gradients of its outputs.
        tangents_bytes: bytes of these gradients.
        inputs_bytes: peak in the backward for inputs; 0 if the backward is one function.
        weights_bytes: peak in the backward for parameters, without the values handed over to it.
        handed_bytes: values that the first hands over to the second, which live between them.
    """

    forward_bytes: int
    backward_bytes: int = 0
    tangents_bytes: int = 0
    inputs_bytes: int = 0
    weights_bytes: int = 0
    handed_bytes: int = 0

    @property
    def most_bytes(self) -> int:
        """The larger peak of forward and of a backward that is one function."""
        return max(self.forward_bytes, self.backward_bytes)


def call_memories(compiled: CompiledProgram) -> list[CallMemory]:
    """Return the memory of every call of ``compiled``."""

    # Layers share a block: one answer for all of them.
    @cache
    def of_region(name: str) -> CallMemory:
        return _of_functions(compiled.regions[name].partitioned)

    memories = []
    for call in compiled.program.calls:
        # Only values with a gradient; masks and tables live longer than one call.
        taken_bytes = sum(
            tensor_bytes(node.meta["val"])
            for node, ref in call.inputs
            if ref.kind == "call"
            and compiled.differentiable[compiled.program.calls[ref.index].region.name][ref.output]
        )
        memory = of_region(call.region.name)
        memories.append(replace(memory, forward_bytes=memory.forward_bytes + taken_bytes))
    return memories


def _of_functions(parts: Partitioned) -> CallMemory:
    forward_bytes, graph = function_peak_bytes(parts.forward), parts.step_backward
    if graph is None:
        return CallMemory(forward_bytes)
    placeholders = graph.find_nodes(op="placeholder")
    tangents_bytes = sum(
        tensor_bytes(node.meta["val"]) for node in placeholders[len(parts.saved) :]
    )
    backward_bytes = function_peak_bytes(graph) + tangents_bytes
    if parts.split is None:
        return CallMemory(forward_bytes, backward_bytes, tangents_bytes)
    stored = {
        node.name
        for node, saved in zip(placeholders, parts.saved, strict=False)
        if not saved.is_activation
    }
    return CallMemory(
        forward_bytes,
        backward_bytes,
        tangents_bytes,
        function_peak_bytes(parts.split.inputs) + tangents_bytes,
        function_peak_bytes(parts.split.weights),
        _handed_bytes(parts.split.inputs, len(parts.split.weights.output_node().args[0]), stored),
    )


def _handed_bytes(inputs: Graph, num_gradients: int, stored: set[str]) -> int:
    """Bytes of the storages of the results of ``inputs`` after ``num_gradients``, each once.

    ``stored``: names of placeholders that are parameters.
    """
    handed: dict[Node, None] = {
        base(node): None for node in inputs.output_node().args[0][num_gradients:]
    }
    return sum(owned_bytes(node) for node in handed if node.name not in stored)
