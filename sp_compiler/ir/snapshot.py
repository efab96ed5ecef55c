"""What the program looked like after one pass: copies that later passes cannot change."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph

from sp_compiler.ir.program import Call, Program, Ref
from sp_compiler.ir.rewriting import copy_graph

FORWARD, BACKWARD, LOSS_BACKWARD = ".forward", ".backward", ".loss_backward"


@dataclass(frozen=True)
class Snapshot:
    """Graphs after one pass.

    Attributes:
        name: of the pass.
        graphs: region name to graph. Once forward and backward are apart there are two for a
            region, named ``"Block.forward"`` and ``"Block.backward"``, and a third,
            ``"Block.loss_backward"``, where it has the model's loss.
        calls: (path of the layer in the model, region name) in execution order.
        wiring: each call with its arguments as text, in the same order; may be left out.
    """

    name: str
    graphs: dict[str, Graph]
    calls: list[tuple[str, str]] = field(default_factory=list)
    wiring: list[str] = field(default_factory=list)

    @classmethod
    def of_program(cls, name: str, program: Program) -> Snapshot:
        """Copies of the region graphs of ``program``."""
        graphs = {region.name: copy_graph(region.module.graph) for region in program.regions}
        return cls(
            name, graphs, program_calls(program), [_call_text(call) for call in program.calls]
        )

    def paths(self, graph_name: str) -> list[str]:
        """The layers that use the graph."""
        region = region_of(graph_name)
        return [path for path, name in self.calls if name in (region, graph_name)]


def program_calls(program: Program) -> list[tuple[str, str]]:
    """(path, region name) of every call."""
    return [(call.path, call.region.name) for call in program.calls]


def region_of(graph_name: str) -> str:
    """``"Block"`` for ``"Block"``, ``"Block.forward"``, ``"Block.backward"`` and so on."""
    for suffix in (FORWARD, LOSS_BACKWARD, BACKWARD):
        graph_name = graph_name.removesuffix(suffix)
    return graph_name


def _call_text(call: Call) -> str:
    return f"{call.region.name}({', '.join(map(_ref_text, call.args))})"


def _ref_text(ref: Ref) -> str:
    if ref.kind in ("param", "buffer", "constant"):
        return f"{ref.kind} {ref.name}"
    if ref.kind == "call":
        return f"call {ref.index}.{ref.output}"
    return "seed" if ref.kind == "seed" else f"input {ref.index}"
