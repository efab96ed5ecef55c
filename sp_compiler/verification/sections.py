"""Comparison of each call of a program with its part of the capture, on random values.

Passes before sharding rewrite one flat graph, and most values passed between calls are still its
nodes. The capture is cut at these::

    capture   embedding ── add ── ... ── add_7 ── ... ── add_11 ── ... ── loss
    program   Prologue     └── Block ────┘ └──── Block ────┘ └─ Epilogue ─┘

A part and its call get the same random values and tangents. If all parts agree, forward and
backward, the program is right by the chain rule. Layers whose parts of the *capture* are equal node
by node are compared once; wrongly merged layers differ there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from sp_compiler.base.pass_report import Pass
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import ancestors, module_of
from sp_compiler.ir.program import Program, Ref, Region
from sp_compiler.ir.rewriting import copy_graph, erase_dead
from sp_compiler.ops.uniform import UNIFORM
from sp_compiler.verification.interpret import run_graph
from sp_compiler.verification.judge import TOLERANCE, Numbers, Precision, Reference
from sp_compiler.verification.precision import NothingDropped
from sp_compiler.verification.random_values import SPREADS, Spread, Values
from sp_compiler.verification.report import Comparison


@dataclass(frozen=True, eq=False)
class Section:
    """The computation of a call, in the capture and in the program.

    Attributes:
        call: index of the call in the program.
        outputs: outputs that the capture also has, with their nodes there.
        captured: the part of the capture: a graph of ``sources`` that returns ``outputs``.
        sources: refs of the placeholders of ``captured``.
        calls: the calls that must run for the section, including those whose results are not in the
            capture, by index, with the positions of the outputs to compute.
        leaves: refs of the sources of both sides.
    """

    call: int
    outputs: Mapping[Ref, Node]
    captured: GraphModule
    sources: Sequence[Ref]
    calls: Mapping[int, Sequence[int]]
    leaves: Sequence[Ref]


@dataclass
class Sections:
    """Cuts ``captured`` at the values that ``program``, which was derived from it, still has.

    Args:
        captured: the capture before any pass has rewritten it.
        program: the program, whose calls have the names of the nodes that they return.
        at_example: ``program`` at the example's sizes.
    """

    captured: Captured
    program: Program
    at_example: Program
    _of_node: dict[Node, Ref] = field(default_factory=dict)
    _nodes: dict[Ref, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        by_name = {n.name: n for n in self.captured.module.graph.nodes if n.op == "call_function"}
        for index, call in enumerate(self.program.calls):
            for output, name in enumerate(call.results):
                # Each node once: two refs of it would get two random values.
                if name in by_name:
                    self._nodes[_result(index, output)] = by_name.pop(name)
        # Returned values correspond, whatever became of their nodes.
        returned = [*zip(self.program.outputs, self.captured.outputs, strict=True)]
        written = self.captured.mutated_buffers
        returned += [(ref, written[name]) for name, ref in self.program.mutated_buffers.items()]
        self._nodes |= {
            ref: node
            for ref, node in returned
            if isinstance(ref, Ref) and ref.kind == "call" and node.op == "call_function"
        }
        self._of_node = {node: ref for ref, node in self._nodes.items()}
        self._of_node |= zip(self.captured.placeholders, self.captured.refs, strict=True)
        self.wired = all(self._is_wired(ref, node) for ref, node in returned)

    def _is_wired(self, ref: Any, node: Any) -> bool:
        """Return whether the program returns the same as the capture, if all sections agree."""
        if not isinstance(node, Node):
            return bool(ref == node)
        return self._nodes.get(ref, node) is node and (
            ref in self._nodes or self._of_node.get(node) == ref
        )

    def distinct(self, values: Values) -> Iterator[Section]:
        """Yield one section per group of calls that are equal in the capture and in the program."""
        known: set[str] = set()
        for index in range(len(self.program.calls)):
            section = self._section(index)
            # Without an output on both sides there is nothing to compare: the call runs as part of
            # the next section.
            if section.outputs and (key := self._key(section, values)) not in known:
                known.add(key)
                yield section

    def _section(self, index: int) -> Section:
        own = {ref: node for ref, node in self._nodes.items() if ref.index == index}
        calls, leaves = self._needed(own)
        # Results of calls that run in the program are computed in the capture too.
        stops = {
            node for node, ref in self._of_node.items() if ref.index not in calls or ref in leaves
        } | set(self.captured.placeholders)
        module, sources = self._cut(list(own.values()), stops)
        merged = dict.fromkeys([*leaves, *sources])
        return Section(index, own, module, sources, calls, list(merged))

    def _needed(self, own: Collection[Ref]) -> tuple[dict[int, list[int]], list[Ref]]:
        """Return the calls that must run for the refs ``own``, with the outputs that they must
        compute, and the refs of their inputs from outside."""
        computed, leaves = dict.fromkeys(own), dict[Ref, None]()
        pending = [*own]
        while pending:
            for ref in self._read(pending.pop()):
                if ref.kind != "call" or ref in self._nodes:
                    leaves[ref] = None
                elif ref not in computed:
                    computed[ref] = None
                    pending.append(ref)
        # If an unknown result depends on a known one of the same call, the latter is computed too.
        unknown = [ref for ref in computed if ref not in own]
        inside = {
            (ref.index, node) for ref in unknown for node in ancestors([self.program.node_of(ref)])
        }
        computed |= {
            ref: None
            for ref in leaves
            if ref.kind == "call" and (ref.index, self.program.node_of(ref)) in inside
        }
        calls: dict[int, list[int]] = {}
        for ref in sorted(computed, key=lambda ref: (ref.index, ref.output)):
            calls.setdefault(ref.index, []).append(ref.output)
        return calls, [ref for ref in leaves if ref not in computed]

    def _read(self, ref: Ref) -> list[Ref]:
        """Return the arguments of the call of ``ref`` on which ``ref`` depends."""
        call, needed = self.program.calls[ref.index], ancestors([self.program.node_of(ref)])
        return [
            arg
            for node, arg in call.inputs
            # A symbol is used only in shapes.
            if node in needed or arg.kind == "size"
        ]

    def _cut(self, outputs: list[Node], stops: set[Node]) -> tuple[GraphModule, list[Ref]]:
        inside = ancestors(outputs, stops) | set(outputs)
        graph, copies, sources = Graph(), dict[Node, Node](), list[Ref]()
        for node in self.captured.module.graph.nodes:
            ref = self._of_node.get(node)
            # A symbol is used only in shapes, so every open size is an input.
            is_size = node.op == "placeholder" and ref is not None and ref.kind == "size"
            if node not in inside and not is_size:
                continue
            if ref is not None and node in stops:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = dict(node.meta)
                sources.append(ref)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        return module_of(graph, self.captured.module), sources

    def _key(self, section: Section, values: Values) -> str:
        """Return a text that is equal for two sections if a proof of one holds for the other."""
        numbers = {ref: number for number, ref in enumerate(section.leaves)}
        leaves = [values.identity(ref) for ref in section.leaves]
        graph = section.captured.graph
        # Placeholders are identified by their refs: their order differs between layers.
        inputs = graph.find_nodes(op="placeholder")
        names = dict(zip(inputs, (f"leaf {numbers[ref]}" for ref in section.sources), strict=True))
        inner = [node for node in graph.nodes if node.op != "placeholder"]
        names |= {node: f"%{number}" for number, node in enumerate(inner)}
        nodes = [
            (str(node.target), repr(map_arg((node.args, node.kwargs), names.__getitem__)))
            for node in inner
        ]
        # Calls by their position in the section, since equal layers have other indices.
        names_of: dict[Ref, Any] = dict(numbers)
        for place, (index, outputs) in enumerate(section.calls.items()):
            names_of |= {_result(index, output): (place, output) for output in outputs}
        calls = [
            (
                id(self.program.calls[index].region),
                outputs,
                list(map(names_of.get, self.program.calls[index].args)),
            )
            for index, outputs in section.calls.items()
        ]
        return repr((leaves, nodes, calls, [ref.output for ref in section.outputs]))

    def compare(self, section: Section, values_of: Callable[[Spread], Values]) -> Comparison:
        """Compare the two sides of ``section``, with the first spread that does not give NaN."""
        for spread in SPREADS:
            values = values_of(spread)
            of_capture = partial(_numbers, _run_captured, section, values)
            reference = Reference.of(of_capture, floors=False)
            if reference.true.is_defined:
                break
        name = self.program.calls[section.call].region.name
        try:
            numbers = _numbers(self._run_calls, section, values, reference.precision)
        except Exception as error:  # an operator may raise anything for wrong operands
            return reference.failed(Pass.OUTLINE, name, error)
        return reference.compare(Pass.OUTLINE, name, numbers)

    def _run_calls(self, section: Section, leaves: Mapping[Ref, Any]) -> Sequence[Any]:
        values = dict(leaves)
        for index, outputs in section.calls.items():
            call = self.at_example.calls[index]
            # Without unneeded results, such as the embeddings if only a mask is needed.
            module = _with_outputs(call.region, outputs)
            results = run_graph(module, list(map(values.get, call.args)))
            values |= {_result(index, output): results[output] for output in outputs}
        return [values[ref] for ref in section.outputs]


def _result(index: int, output: int) -> Ref:
    return Ref("call", index=index, output=output)


def _with_outputs(region: Region, outputs: Sequence[int]) -> GraphModule:
    """Return the part of ``region`` that computes ``outputs``, with ``None`` for the others."""
    graph = copy_graph(region.module.graph)
    output = graph.output_node()
    output.args = (tuple(each if i in outputs else None for i, each in enumerate(output.args[0])),)
    erase_dead(graph)
    return module_of(graph, region.module)


def _run_captured(section: Section, leaves: Mapping[Ref, Any]) -> Sequence[Any]:
    return run_graph(section.captured, [leaves[ref] for ref in section.sources])


def _numbers(
    run: Callable[[Section, Mapping[Ref, Any]], Sequence[Any]],
    section: Section,
    values: Values,
    precision: Precision,
) -> Numbers:
    leaves = {ref: precision.leaf(values.of(ref)) for ref in section.leaves}
    with precision.entered(), NothingDropped():
        outputs = list(run(section, leaves))
        flowing = [
            (value, values.tangent(ref, value).to(value.dtype))
            for ref, value in zip(section.outputs, outputs, strict=True)
            if isinstance(value, Tensor) and value.requires_grad
        ]
        if flowing:
            torch.autograd.backward([v for v, _ in flowing], [tangent for _, tangent in flowing])
    grads = {
        # With the output: a call may pass several values, and each gradient needs its own name.
        f"{ref.kind} {ref.name or f'{ref.index}.{ref.output}'}": value.grad
        for ref, value in leaves.items()
        if isinstance(value, Tensor)
    }
    return Numbers([value.detach() for value in outputs], grads)


def check_wiring(sections: Sections) -> Iterator[Comparison]:
    """Yield a failed comparison if the program returns other values than the capture."""
    if not sections.wired:
        message = "the program returns other values than the capture"
        yield Comparison(Pass.OUTLINE, "model", float("inf"), TOLERANCE, message=message)


def check_sections(
    sections: Sections, distinct: Sequence[Section], values_of: Callable[[Spread], Values]
) -> Iterator[Comparison]:
    """Compare the two sides of each of the ``distinct`` sections.

    Args:
        sections: all sections of the capture and the program.
        distinct: the sections to compare.
        values_of: returns the values for a spread of random numbers.
    """
    for section in distinct:
        regions = [sections.program.calls[index].region for index in section.calls]
        # The two sides would draw different numbers.
        if not any(draws_uniform(region) for region in regions):
            yield sections.compare(section, values_of)


def draws_uniform(graph: Region | Captured) -> bool:
    """Return whether it draws random numbers other than dropout masks."""
    return any(node.target is UNIFORM.overload for node in graph.module.graph.nodes)
