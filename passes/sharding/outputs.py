"""The model's outputs: which may stay sharded, and their separation from values between regions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch.fx import Graph

from sp_compiler.ir.fx import module_of
from sp_compiler.ir.program import Call, Program, Ref, RefKind, Region
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.symbolic import symbol_of, symbols_in
from sp_compiler.options import CompileOptions


def may_shard(program: Program, index: int, options: CompileOptions) -> bool:
    """Return whether output ``index`` may stay sharded.

    If the model returns a loss, logits stay sharded unless the user asks for full ones. Values that
    the forward stores in attributes are full, because user code reads them as in eager mode.
    """
    num_returned = program.out_spec.num_leaves
    if program.outputs[index] in program.outputs[num_returned:]:
        return False
    if options.outputs != "auto":
        return options.outputs == "shard"
    # A loss is an output without dims, and therefore cannot itself be sharded.
    returned = [ref for place, ref in program.call_outputs.items() if place < num_returned]
    shapes = [program.node_of(ref).meta["val"].shape for ref in returned]
    ref = program.outputs[index]
    return len(program.node_of(ref).meta["val"].shape) > 1 and any(
        len(shape) == 0 for shape in shapes
    )


@dataclass(frozen=True)
class Routed:
    """A program whose outputs no region reads; ``refs``: outputs that some region did read."""

    program: Program
    refs: tuple[Ref, ...]


def route_outputs(program: Program) -> Routed:
    """Separate model outputs from values that other regions read, so that both can be placed.

    A region called once returns such a value twice; outputs of a repeated region, whose ports have
    one placement in all calls, pass through a region of their own at the end.
    """
    read = {
        (ref.index, ref.output) for call in program.calls for ref in call.args if ref.kind == "call"
    }
    count = Counter(id(call.region) for call in program.calls)
    moved: dict[Ref, Ref] = {}
    passed: list[Ref] = []
    # Each only once: a model may return one value in several places.
    for ref in dict.fromkeys(program.call_outputs.values()):
        repeated = count[id(program.calls[ref.index].region)] > 1
        if repeated:
            passed.append(ref)
        elif (ref.index, ref.output) in read:
            program = _return_twice(program, ref)
            outputs = program.calls[ref.index].region.outputs
            moved[ref] = Ref("call", index=ref.index, output=len(outputs) - 1)
    calls = list(program.calls)
    if passed:
        region, sizes = _pass_through(program, passed)
        calls.append(Call(region, "", (*passed, *sizes)))
        moved |= {ref: Ref("call", index=len(calls) - 1, output=k) for k, ref in enumerate(passed)}
    outputs = [moved.get(ref, ref) if isinstance(ref, Ref) else ref for ref in program.outputs]
    return Routed(replace(program, calls=calls, outputs=outputs), tuple(moved.values()))


def _return_twice(program: Program, ref: Ref) -> Program:
    # The same node at two positions: sharding places the positions separately and converts.
    old = program.calls[ref.index].region
    graph = copy_graph(old.module.graph)
    returned = graph.output_node()
    returned.args = ([*returned.args[0], returned.args[0][ref.output]],)
    region = replace(old, module=module_of(graph, old.module, old.name))
    calls = [replace(c, region=region) if c.region is old else c for c in program.calls]
    return replace(program, calls=calls)


def _pass_through(program: Program, refs: list[Ref]) -> tuple[Region, list[Ref]]:
    """Return a region that returns ``refs``, and the refs of the open sizes that it takes after
    them."""
    graph = Graph()
    nodes = []
    for number, ref in enumerate(refs):
        source = program.node_of(ref)
        node = graph.placeholder(f"output_{number}")
        node.meta = {k: v for k, v in source.meta.items() if k in ("val", "requires_grad")}
        nodes.append(node)
    # Its shapes have symbols, and every region gets the sizes that define its symbols as inputs.
    sizes = {
        symbol_of(node): (node, ref)
        for call in program.calls
        for node, ref in call.inputs
        if ref.kind == "size"
    }
    symbols = symbols_in(nodes) if sizes else set()
    taken = [size for symbol, size in sizes.items() if symbol in symbols]
    for source, _ in taken:
        graph.placeholder(source.name).meta = dict(source.meta)
    graph.output(nodes)
    kinds: list[RefKind] = [*["call"] * len(refs), *["size"] * len(taken)]  # type: ignore[list-item]
    region = Region(
        name="Outputs",
        module=module_of(graph, name="Outputs"),
        input_kinds=tuple(kinds),
        input_names=tuple(node.name for node in graph.find_nodes(op="placeholder")),
    )
    return region, [ref for _, ref in taken]
