"""Partition of a flat graph into the program's regions, one per distinct layer.

Nodes outside layers (:mod:`sp_compiler.base.provenance`) are glue. Layers whose graphs are equal,
including shapes, dtypes and which values require a gradient, share one region; so do layers that
compute the same in another order, such as keys before queries in every other layer. A layer whose
results are all detached later (a teacher's, under ``no_grad``) has no gradients and saves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.base.placement import Placement
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import reach
from sp_compiler.ir.hints import Wish
from sp_compiler.ir.program import Call, Program, Ref, Region
from sp_compiler.passes.outline.distinct import (
    DistinctRegions,
    allowed_for_inputs,
    stored_differently,
)
from sp_compiler.passes.outline.draft import draft_region
from sp_compiler.passes.outline.pieces import TABLES, pieces_of


def outline(
    captured: Captured,
    wishes: Mapping[str, Wish] | None = None,
    stored: Mapping[str, Placement] | None = None,
    *,
    tables_apart: bool = False,
) -> Program:
    """Build the program of a normalized capture, which is not modified.

    Every call's arguments come from parameters, buffers, constants, user inputs, the seed and
    earlier calls. A value that a piece only passes on is not one of its outputs.

    Args:
        captured: normalized.
        wishes: hints by parameter; layers whose parameters must be placed differently get different
            regions.
        stored: placements of parameters that an earlier compilation decided; layers that differ in
            them get different regions, too.
        tables_apart: whether values that layers read and that depend only on inputs (masks, rotary
            tables) are computed in a separate call, which every stage of a pipeline can run.
    """
    wishes = dict(wishes or {})
    refs = dict(zip(captured.placeholders, captured.refs, strict=True))
    fixed = [node for node, ref in refs.items() if ref.kind not in ("param", "seed")]
    pieces = pieces_of(captured.module.graph, fixed if tables_apart else None)
    apart = stored_differently(pieces, refs, stored or {})
    # Tables draw nothing: with and without a call for them, random numbers are the same.
    num_tables = sum(piece.name == TABLES for piece in pieces)
    distinct, report = DistinctRegions(), report_of(Pass.OUTLINE)
    reached = _reached_by_gradients(captured)
    program_calls: list[Call] = []
    for index, piece in enumerate(pieces):
        inside = set(piece.nodes)
        outputs = [n for n in piece.nodes if any(user not in inside for user in n.users)]
        is_trained = not reached.isdisjoint(outputs)
        draft, inputs = draft_region(piece, refs, outputs, is_trained=is_trained)
        num_distinct = len(distinct.regions)
        use = distinct.use_of(draft, allowed_for_inputs(inputs, refs, wishes, apart))
        # Layers of one class are expected to share a region.
        alike = next((call for call in program_calls if call.region.name == piece.name), None)
        if alike is not None and alike.path and len(distinct.regions) > num_distinct:
            reason = f"the layer differs from {alike.path}, and is compiled separately"
            report.decline(piece.nodes[0], reason)
        args = tuple(
            Ref("seed", index=index - num_tables) if ref.kind == "seed" else ref
            for ref in (refs[inputs[position]] for position in use.inputs)
        )
        results = [""] * len(use.region.outputs)
        # Later pieces find the results of this one in ``refs``.
        for node, position in zip(outputs, use.outputs, strict=True):
            refs[node] = Ref("call", index=index, output=position)
            results[position] = node.meta.get("replaces", node.name)
        program_calls.append(Call(use.region, piece.layer.path, args, tuple(results)))
    report.rewrote(len(pieces) - len(distinct.regions), kind="layer that shares a region")
    _make_names_unique(distinct.regions)
    returned = [refs[leaf] if isinstance(leaf, Node) else leaf for leaf in captured.outputs]
    return Program(
        calls=program_calls,
        outputs=returned,
        out_spec=captured.out_spec,
        mutated_buffers={name: refs[node] for name, node in captured.mutated_buffers.items()},
        aliases=dict(captured.aliases),
        constants=dict(captured.constants),
        notes=list(captured.notes),
        parameters=captured.parameters,
        wishes=wishes,
        sizes=captured.sizes,
        functions=captured.functions,
        decisions=captured.decisions,
        stored=captured.stored,
        experts=captured.experts,
        copied=captured.copied,
    )


def _reached_by_gradients(captured: Captured) -> set[Node]:
    """Return the values that a gradient may reach; those that affect the outputs only through a
    detach are left out."""
    leaves = [leaf for leaf in captured.outputs if isinstance(leaf, Node)]
    trained = [leaf for leaf in leaves if leaf.meta["requires_grad"]]
    return set(
        reach(trained, lambda node: (x for x in node.all_input_nodes if x.meta["requires_grad"]))
    )


def _make_names_unique(regions: Iterable[Region]) -> None:
    """Number the second and later regions of the same name: ``Block``, ``Block2``."""
    # A model may have a class ``Block2`` of its own, which comes first or later.
    taken: set[str] = set()
    for region in regions:
        name, count = region.name, 1
        while name in taken:
            count += 1
            name = f"{region.name}{count}"
        taken.add(name)
        region.name = name
