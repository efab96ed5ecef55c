"""Extraction of graphs from arguments and results of passes."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from torch.fx import Graph

from sp_compiler.ir.captured import Captured
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.program import Program, Region
from sp_compiler.ir.snapshot import Snapshot, copy_graph
from sp_compiler.passes.memory.tag_program import TaggedProgram
from sp_compiler.passes.sharding.shard import Sharded
from sp_compiler.trace.joint import JointGraph


@singledispatch
def graphs_of(subject: Any, region: str = "") -> dict[str, Graph]:
    """Return the graphs in an argument or result of a pass, by name; none for other objects.

    ``region`` is the name of the region of an unnamed graph.
    """
    return {}


@graphs_of.register
def _(subject: Graph, region: str = "") -> dict[str, Graph]:
    return {region: subject}


@graphs_of.register
def _(subject: Captured, region: str = "") -> dict[str, Graph]:
    return {"model": subject.module.graph}


@graphs_of.register
def _(subject: Region, region: str = "") -> dict[str, Graph]:
    return {subject.name: subject.module.graph}


@graphs_of.register
def _(subject: Program, region: str = "") -> dict[str, Graph]:
    return {each.name: each.module.graph for each in subject.regions}


@graphs_of.register
def _(subject: Sharded | TaggedProgram, region: str = "") -> dict[str, Graph]:
    return graphs_of(subject.program)


@graphs_of.register
def _(subject: JointGraph, region: str = "") -> dict[str, Graph]:
    return {region: subject.graph}


@graphs_of.register(list)
def _(subject: list[Any], region: str = "") -> dict[str, Graph]:
    # One graph per number of chunks to choose from. A single one without chunks is the original.
    ways = [way for way in subject if isinstance(way, JointGraph)]
    if len(ways) == 1:
        return {region: ways[0].graph} if ways[0].chunks else {}
    return {way.name: way.graph for way in ways}


@graphs_of.register
def _(subject: Partitioned, region: str = "") -> dict[str, Graph]:
    return {f"{region}.{name}": graph for name, graph in subject.functions.items()}


def snapshot_after(name: str, subject: Any, region: str = "") -> Snapshot:
    """Return copies of the graphs of ``subject`` after the pass ``name``."""
    # Sharded and tagged programs also hold other results of their pass; a snapshot has only graphs.
    program = getattr(subject, "program", subject)
    if isinstance(program, Program):
        return Snapshot.of_program(name, program)
    graphs = graphs_of(subject, region)
    kept = {region: subject.kept_bytes} if isinstance(subject, Partitioned) else {}
    return Snapshot(name, {each: copy_graph(graph) for each, graph in graphs.items()}, kept=kept)
