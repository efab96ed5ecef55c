"""The program after one pass: copies of its graphs that later passes cannot change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from torch import Tensor
from torch.fx import Graph, Node

from sp_compiler.base.errors import ArgumentError, UnsupportedError, expected_one_of
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.ir.graph_theory import as_networkx
from sp_compiler.ir.program import Program, Ref
from sp_compiler.ir.rewriting import copy_graph
from sp_compiler.ir.text import dtype_name, meta_text, render_target

if TYPE_CHECKING:
    import networkx as nx

# Suffixes of the name of the region in names of graphs.
FORWARD, BACKWARD, LOSS_BACKWARD = ".forward", ".backward", ".loss_backward"
BACKWARD_INPUTS, BACKWARD_WEIGHTS = ".backward_inputs", ".backward_weights"
# Backward that also computes deferred gradients of the next call (in forward order).
BACKWARD_BEHIND = ".backward_behind"
# Backwards with recompute prefetch: they recompute values for the previous call.
RECOMPUTE, BACKWARD_REST, BACKWARD_AHEAD = ".recompute", ".backward_rest", ".backward_ahead"
SECOND_WAYS = (
    *(BACKWARD_INPUTS, BACKWARD_WEIGHTS, BACKWARD_BEHIND),
    *(RECOMPUTE, BACKWARD_REST, BACKWARD_AHEAD),
)
"""Other forms of the backward."""
# Separates the name of the region from the chunked part.
IN_CHUNKS = ", "


@dataclass(frozen=True)
class Snapshot:
    """Graphs after one pass.

    Attributes:
        name: name of the pass.
        graphs: region name to graph. After the partition a region has two graphs, named
            ``"Block.forward"`` and ``"Block.backward"``, and a third, ``"Block.loss_backward"``, if
            it has the model's loss. It has two more if a part of backward is deferred, and three
            more with recompute prefetch, or if consecutive calls leave gradients to each other.
            After the chunks it has one for each number of chunks, such as
            ``"Epilogue, loss in 4 chunks"``.
        calls: (path of the layer in the model, region name) in execution order.
        wiring: each call with its arguments as text, in the same order; optional.
        kept: region name to the bytes that one call saves for its backward, after the partition.
        functions: calls of the model's autograd functions, which the graphs refer to by number.
    """

    name: str
    graphs: dict[str, Graph]
    calls: list[tuple[str, str]] = field(default_factory=list)
    wiring: list[str] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    functions: Sequence[object] = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "the graphs of a compiled module cannot be pickled: their nodes hold operators and "
            "fake tensors; save str(stage), module.code, or module.plan.to_json()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Snapshot:
        return self  # immutable

    @classmethod
    def of_program(cls, name: str, program: Program) -> Snapshot:
        """Copy the region graphs of ``program``."""
        # Copies, since later passes rewrite the graphs in place.
        graphs = {region.name: copy_graph(region.module.graph) for region in program.regions}
        wiring = [
            f"{call.region.name}({', '.join(map(_ref_text, call.args))})" for call in program.calls
        ]
        return cls(name, graphs, program_calls(program), wiring, functions=program.functions)

    def to_networkx(self) -> nx.MultiDiGraph:
        """Return all graphs as one networkx graph, in which they are not connected to each other.

        >>> graph = compiled.stages["shard"].to_networkx()
        >>> sums = [name for name, node in graph.nodes(data=True) if node["placement"] == "P"]
        >>> nx.ancestors(graph, sums[0])

        Nodes are named ``"<graph>/<node>"`` and have the attributes ``graph``; ``op`` and
        ``target`` of FX, as text; ``shape`` (one rank's after sharding; ``None`` if the value is
        not a single tensor; open sizes as text) and ``dtype``; ``placement``; ``module``, the path
        in the model; and ``source_line``, as "file.py:12 code"; "" for missing ones. An edge goes
        from an operand to each of its users; ``position`` is the operand's position there. The
        graph itself has the attributes ``name``, that of the pass, and ``calls``.
        """
        # Names of nodes are unique only within a graph.
        names = {node: name for name, graph in self.graphs.items() for node in graph.nodes}
        result = as_networkx(
            names,
            lambda node: f"{names[node]}/{node.name}",
            lambda node: {"graph": names[node], **_attributes(node)},
        )
        result.graph.update(name=self.name, calls=list(self.calls))
        return result

    def renamed(self, names: Sequence[str]) -> Snapshot:
        """Return a copy in which regions have ``names``, one per call; other calls are dropped.

        A graph whose calls get several names occurs once per name.
        """
        if not self.calls:  # before the model was cut into regions
            return self
        calls = list(zip(names, self.calls, strict=False))
        graphs_of: dict[str, dict[str, Graph]] = {}
        for name, graph in self.graphs.items():
            graphs_of.setdefault(region_of(name), {})[name] = graph
        return replace(
            self,
            graphs={
                f"{new}{name.removeprefix(old)}": graph
                for new, (_, old) in calls
                for name, graph in graphs_of[old].items()
            },
            calls=[(path, new) for new, (path, _) in calls],
            kept={new: self.kept[old] for new, (_, old) in calls if old in self.kept},
            wiring=[
                f"{new}{text.removeprefix(old)}"
                for (new, (_, old)), text in zip(calls, self.wiring, strict=False)
            ],
        )

    def paths(self, graph_name: str) -> list[str]:
        """Return the paths of the layers that use the graph."""
        region = region_of(graph_name)
        return [path for path, name in self.calls if name in (region, graph_name)]

    def region_by_place(self) -> dict[tuple[str, int], str]:
        """Return the region of each call by (path of its layer, number of earlier calls there)."""
        num_calls: Counter[str] = Counter()
        regions = {}
        for path, region in self.calls:
            regions[path, num_calls[path]] = region
            num_calls[path] += 1
        return regions


class Stages(dict[str, Snapshot]):
    """Graphs after each pass, by name, in order; two stages have a second public name.

    ``"capture"`` is the captured model as regions, before sharding; ``"final"`` is one rank's
    program with tags for recomputation.
    """

    ALIASES: ClassVar[dict[str, Pass]] = {"capture": Pass.OUTLINE, "final": Pass.TAG}

    def __missing__(self, name: str) -> Snapshot:
        stage = self.ALIASES.get(name)
        # A model without operators has no regions, and so no graphs.
        if stage is None or not self:
            raise KeyError(name)
        return replace(self.get(stage, Snapshot(stage, {})), name=name)


def unknown_stage(name: str, stages: Iterable[str]) -> ArgumentError:
    """Return the error for a ``name`` that is neither in ``stages`` nor an alias."""
    known = list(dict.fromkeys([*Stages.ALIASES, *stages]))
    why = "this pass did not run here, or has no graphs; " if name in set(Pass) else ""
    return ArgumentError(f"stage {name!r}: {why}{expected_one_of(name, known)}")


def program_calls(program: Program) -> list[tuple[str, str]]:
    """Return (path, region name) of every call."""
    return [(call.path, call.region.name) for call in program.calls]


def region_of(graph_name: str) -> str:
    """Return ``"Block"`` for ``"Block"``, ``"Block.forward"``, ``"Block.backward"`` and so on."""
    for suffix in (FORWARD, LOSS_BACKWARD, BACKWARD, *SECOND_WAYS):
        graph_name = graph_name.removesuffix(suffix)
    return graph_name.partition(IN_CHUNKS)[0]


def _attributes(node: Node) -> dict[str, Any]:
    """Return the attributes of a node for :meth:`Snapshot.to_networkx`, as plain Python values."""
    value = node.meta.get("val")
    shape, dtype = None, ""
    if isinstance(value, Tensor):
        shape = tuple(size if isinstance(size, int) else str(size) for size in value.shape)
        dtype = dtype_name(value.dtype)
    return {
        "op": node.op,
        "target": render_target(node),
        "shape": shape,
        "dtype": dtype,
        "placement": meta_text(node, "placement"),
        "module": module_path(node),
        "source_line": source_line(node),
    }


def _ref_text(ref: Ref) -> str:
    if ref.kind in ("param", "buffer", "constant"):
        return f"{ref.kind} {ref.name}"
    if ref.kind in ("call", "size"):
        return f"{ref.kind} {ref.index}.{ref.output}"
    return "seed" if ref.kind == "seed" else f"input {ref.index}"
