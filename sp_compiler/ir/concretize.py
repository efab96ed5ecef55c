"""Copies of programs and graphs with the example's sizes in place of open ones.

Passes and reports that depend on sizes (placements, partition, memory, checks) read these copies:
comparing open sizes would record a guard, and the program would be valid for fewer calls.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.forward_backward import LookAhead, Partitioned, SplitBackward
from sp_compiler.ir.fx import module_of
from sp_compiler.ir.program import Program, Region
from sp_compiler.ir.symbolic import Sizes, example_number


def concretized(compiled: CompiledProgram) -> CompiledProgram:
    """Copy ``compiled`` with the example's sizes in place of open ones, for the plan."""
    example = Concretizer(compiled.program.sizes)
    regions = {
        name: replace(
            region,
            region=example.region(region.region),
            partitioned=example.partitioned(region.partitioned),
        )
        for name, region in compiled.regions.items()
    }
    return replace(compiled, program=example.program(compiled.program), regions=regions)


class Concretizer:
    """Makes copies of graphs with the example's sizes in place of symbols, without recording
    guards.

    Without open ``sizes``, it returns everything as it is.

    Attributes:
        twins: node of a copy to the node that it was copied from.
    """

    def __init__(self, sizes: Sizes | None) -> None:
        self.twins: dict[Node, Node] = {}
        self._open = sizes is not None
        # A separate mode without a ShapeEnv: with the captured one, sizes would be open again.
        self._mode = FakeTensorMode()
        # By identity, which is unique while the programs that own the graphs and regions live. One
        # copy of each, since calls that share a region must share the copy.
        self._graphs: dict[int, Graph] = {}
        self._regions: dict[int, Region] = {}

    def graph(self, graph: Graph) -> Graph:
        """Return the copy of ``graph``, made once."""
        if not self._open:  # the usual case, without the cost of a copy
            return graph
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = self.copied(graph)
        return self._graphs[id(graph)]

    def copied(self, graph: Graph) -> Graph:
        """Return a new copy of ``graph``, whose sizes may be open even if the program's are not."""
        copy = Graph()
        copies: dict[Node, Node] = {}
        for node in graph.nodes:
            new = copies[node] = copy.node_copy(node, copies.__getitem__)
            new.args = map_aggregate(new.args, example_number)
            new.kwargs = map_aggregate(new.kwargs, example_number)
            if "val" in node.meta:
                new.meta = {**node.meta, "val": pytree.tree_map(self._value, node.meta["val"])}
            self.twins[new] = node
        return copy

    def region(self, region: Region) -> Region:
        """Return the copy of a region."""
        if not self._open:
            return region
        if id(region) not in self._regions:
            graph = self.graph(region.module.graph)
            module = module_of(graph, region.module, region.name)
            self._regions[id(region)] = replace(region, module=module)
        return self._regions[id(region)]

    def program(self, program: Program) -> Program:
        """Return the copy of a program, including its regions."""
        calls = [replace(call, region=self.region(call.region)) for call in program.calls]
        return replace(program, calls=calls, sizes=None)

    def partitioned(self, parts: Partitioned) -> Partitioned:
        """Return the copies of a region's forward and backward."""
        loss, ahead, split = parts.loss, parts.ahead, parts.split
        return replace(
            parts,
            forward=self.graph(parts.forward),
            backward=None if parts.backward is None else self.graph(parts.backward),
            loss=None if loss is None else replace(loss, backward=self.graph(loss.backward)),
            ahead=ahead and LookAhead(*map(self.graph, (ahead.recompute, ahead.rest, ahead.both))),
            split=split
            and SplitBackward(
                self.graph(split.inputs),
                self.graph(split.weights),
                None if split.both is None else self.graph(split.both),
            ),
        )

    def twin(self, node: Node) -> Node:
        """Return the node that ``node`` was copied from."""
        return self.twins.get(node, node)

    def _value(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return example_number(value)
        # With the example's strides: a tensor that is not contiguous must stay so.
        shape, strides = map(example_number, value.shape), map(example_number, value.stride())
        with self._mode:
            return torch.empty_strided(
                tuple(shape), tuple(strides), dtype=value.dtype, device=value.device
            )
