"""Distinct regions: pieces that are equal, or equal up to the order of their nodes, share one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from sp_compiler.base.placement import Placement
from sp_compiler.ir.fx import is_call
from sp_compiler.ir.graph_theory import ComparableGraph, isomorphism
from sp_compiler.ir.hints import Wish
from sp_compiler.ir.op_traits import DRAWS, draws
from sp_compiler.ir.program import Ref, Region
from sp_compiler.passes.outline.draft import Draft
from sp_compiler.passes.outline.pieces import Piece


@dataclass(frozen=True)
class Use:
    """Use of a region by a piece: correspondence of the piece's values to the region's.

    Attributes:
        region: the region with the computation of the piece.
        inputs: for each placeholder of ``region`` its position among the inputs of the piece.
        outputs: for each output of the piece its position among those of ``region``.
    """

    region: Region
    inputs: Sequence[int]
    outputs: Sequence[int]


class DistinctRegions:
    """The regions so far; a piece that is equal to one of them becomes a use of it."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._uses: dict[str, Use] = {}
        self._candidates: list[tuple[ComparableGraph, Draft, Region]] = []

    def use_of(self, draft: Draft, allowed: Mapping[int, object]) -> Use:
        """Return the region of ``draft``, found by its text or by isomorphism, or else created.

        ``allowed``: see :func:`allowed_for_inputs`. Regions with different ones are different,
        because their parameters are placed differently.
        """
        text = f"{_canonical_text(draft)}\n{allowed}"
        if text not in self._uses:
            # Few layers of a model get here: the others equal an earlier one, including the order.
            candidate = ComparableGraph(draft.graph, _labels(draft, allowed).__getitem__)
            use = self._reordered_use(candidate, draft)
            if use is None:
                region = draft.finish()
                use = Use(region, range(len(draft.inputs)), range(len(draft.outputs)))
                self.regions.append(region)
                self._candidates.append((candidate, draft, region))
            self._uses[text] = use  # a third layer in this order is then found by its text
        return self._uses[text]

    def _reordered_use(self, graph: ComparableGraph, draft: Draft) -> Use | None:
        for known_graph, known_draft, region in self._candidates:
            twins = isomorphism(known_graph, graph)
            if twins is not None:
                inputs = [twins[node] for node in draft.inputs]
                outputs = {node: position for position, node in enumerate(known_draft.outputs)}
                return Use(
                    region,
                    [inputs.index(node) for node in known_draft.inputs],
                    [outputs[twins[node]] for node in draft.outputs],
                )
        return None


def _canonical_text(draft: Draft) -> str:
    """Return text of everything that must agree for two pieces to share a region, without names."""
    # A dictionary lookup per layer: comparing each with all others would be quadratic.
    number = {node: index for index, node in enumerate(draft.graph.nodes)}
    lines = [" ".join(draft.input_kinds)]
    for node in draft.graph.nodes:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _Numbered(number[n]))
        target = node.target if node.op == "call_function" else ""
        lines.append(f"{node.op} {target} {args} {dict(sorted(kwargs.items()))} {_type_text(node)}")
    return "\n".join(lines)


def _labels(draft: Draft, allowed: Mapping[int, object]) -> dict[Node, str]:
    """Return for each node text of everything but its operands that must agree for two pieces to
    share a region.

    Parameters and buffers are identified by their names in the layer: weights of one shape must not
    swap names in generated code and reports. Counter-based draws are distinguished by their users
    instead of the number of their site, which belongs to the region. Other random numbers come from
    torch's generator, in order.
    """
    labels = {}
    for position, node in enumerate(draft.inputs):
        kind = draft.input_kinds[position]
        name = draft.input_names[position] if kind in ("param", "buffer") else ""
        labels[node] = f"{kind} {name} {allowed.get(position)} {_type_text(node)}"
    num_drawn = 0
    for node in draft.graph.nodes:
        if node.op != "call_function":
            continue
        # All operands look the same here: the matcher compares edges.
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: _Numbered(0))
        if is_call(node, *DRAWS):
            args = (*args[:3], *args[4:])  # without the site
        turn = num_drawn if draws(node) else None
        num_drawn += turn is not None
        call = f"{node.target} {args} {dict(sorted(kwargs.items()))}"
        labels[node] = f"{call} {turn} {_type_text(node)}"
    return labels


def allowed_for_inputs(
    inputs: list[Node],
    refs: dict[Node, Ref],
    wishes: Mapping[str, Wish],
    stored: Mapping[str, Placement],
) -> dict[int, object]:
    """Return the placements that inputs can have, by position: the ``stored`` one, or those that
    the user's hints allow (see :attr:`sp_compiler.ir.hints.Wish.allowed`); others are left out."""
    names = [refs[node].name if refs[node].kind == "param" else "" for node in inputs]
    hinted = {i: wishes[name].allowed for i, name in enumerate(names) if name in wishes}
    return {**hinted, **{i: stored[name] for i, name in enumerate(names) if name in stored}}


def stored_differently(
    pieces: Iterable[Piece], refs: Mapping[Node, Ref], stored: Mapping[str, Placement]
) -> dict[str, Placement]:
    """Return those of ``stored`` that differ between layers of one class."""
    in_layers: dict[tuple[str, str], dict[str, Placement]] = {}
    for piece in pieces:
        read = {refs[x] for node in piece.nodes for x in node.all_input_nodes if x in refs}
        for name in {ref.name for ref in read if ref.kind == "param"} & stored.keys():
            inside = piece.name, name.removeprefix(piece.layer.path)
            in_layers.setdefault(inside, {})[name] = stored[name]
    differing = [each for each in in_layers.values() if len({*each.values()}) > 1]
    return {name: where for each in differing for name, where in each.items()}


@dataclass(frozen=True)
class _Numbered:
    """A node in the canonical text."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


def _type_text(node: Node) -> str:
    if node.op == "output":
        return ""
    value = node.meta["val"]
    values = value if isinstance(value, (tuple, list)) else [value]
    # Without strides: a graph has reshapes instead of views, which do not depend on strides.
    types = [
        f"{v.dtype}{list(v.shape)}@{v.device}" if isinstance(v, Tensor) else str(v) for v in values
    ]
    return f"{types} grad={node.meta['requires_grad']}"
