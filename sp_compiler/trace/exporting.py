"""One run of ``torch.export`` on a model, and the information recorded during it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import CaptureError, SPCompilerError, UnsupportedError
from sp_compiler.ir.fx import arguments, calls
from sp_compiler.ir.rewriting import fake_mode_of
from sp_compiler.trace.arguments import refused_by_export
from sp_compiler.trace.attributes.buffers import SetBuffers, set_buffers_written
from sp_compiler.trace.attributes.changes import (
    Changes,
    Key,
    Settled,
    changed_attributes,
    settle,
    watched_state,
)
from sp_compiler.trace.attributes.outside import numbers_outside_watched
from sp_compiler.trace.attributes.trained import refuse_trained_constants
from sp_compiler.trace.autograd_functions import FunctionCall
from sp_compiler.trace.capture_errors import capture_error, users_frames
from sp_compiler.trace.decisions import DataDependentError, Reads, recorded_reads
from sp_compiler.trace.decisions.rows import ChosenRows
from sp_compiler.trace.environment import export_context, warn_of_attributes
from sp_compiler.trace.foreign_random import NEXT_NUMBERS, ForeignDraw
from sp_compiler.trace.functionalize import functionalize
from sp_compiler.trace.partly_meta import all_on_meta

_T = TypeVar("_T")
# How torch prints a tensor without values.
_TRACED = re.compile(r"\b(Fake|Functional)Tensor\(")


@dataclass
class Export:
    """Graph of one run, and what was recorded during it.

    Attributes:
        exported: functional graph; it returns the model's output, then a list of tensors that the
            forward stored in attributes.
        functions: calls of autograd functions.
        reads: numbers that the forward reads from inputs and buffers.
        changes: attributes that the forward changed.
        buffers: buffers that the forward sets.
        outside: changes of numbers outside of the model, as text by name.
        text: text of the exported graph.
    """

    exported: ExportedProgram
    functions: list[FunctionCall]
    reads: Reads
    changes: Changes
    buffers: SetBuffers
    outside: dict[str, str]
    text: str


@dataclass
class ExportRun:
    """A model and inputs to export it for.

    Attributes:
        model: unmodified.
        args, kwargs: examples.
        shapes: dynamic shapes of the inputs, if sizes are left open.
        use_cache: the caller's argument; ``None`` if it is not given.
        leaves: real inputs.
        names: the user's names of the inputs.
        rows: how to treat rows that the forward selects by values of inputs and buffers.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Any
    use_cache: bool | None
    leaves: Sequence[Any]
    names: Sequence[str]
    rows: ChosenRows = field(default_factory=ChosenRows)

    def run(self, unchanged: Collection[str] = ()) -> Export:
        """Export the model as it is.

        Args:
            unchanged: paths of modules whose buffers stay as they are, whatever the forward sets.

        Raises:
            CaptureError, UnsupportedError: see :func:`sp_compiler.trace.export.capture`.
        """
        try:
            return self._run(unchanged, None)
        except ForeignDraw as draw:
            drawn = draw
        exports = []
        for which in NEXT_NUMBERS:
            with drawn.numbers(which):
                exports.append(self._run(unchanged, drawn))
        latest = exports.pop()
        for each in exports:
            if each.text != latest.text or not _same_constants(each.exported, latest.exported):
                raise drawn.refusal()
        return latest

    def _run(self, unchanged: Collection[str], drawn: ForeignDraw | None) -> Export:
        with (
            all_on_meta(self.model),
            export_context(self.model, use_cache=self.use_cache) as functions,
            watched_state(self.model) as changes,
            set_buffers_written(self.model, unchanged) as buffers,
            numbers_outside_watched(self.model) as outside,
            recorded_reads(self.model, self.leaves, self.rows, drawn) as reads,
        ):
            try:
                exported = torch.export.export(
                    self.model,
                    self.args,
                    dict(self.kwargs),
                    dynamic_shapes=self.shapes,
                    strict=False,
                )
                text = str(exported.graph)
                _name_all_users(exported.graph_module)
                _unfreeze(exported.graph_module.graph)
                _write_eps(exported.graph_module)
                exported = functionalize(exported)
                trained = [key for key, each in self.model.named_buffers() if each.requires_grad]
                refuse_trained_constants(exported, reads.trained, trained)
            except ForeignDraw:
                raise
            except DataDependentError as error:  # its text says as much as torch's would
                raise capture_error(self.model, error, reads) from None
            except Exception as error:  # user code and export may raise anything
                if refused := refused_by_export(error, self.names, self.leaves):
                    raise refused from None
                said = capture_error(self.model, error, reads)
                raise said from error.with_traceback(users_frames(error.__traceback__))
        return Export(exported, functions, reads, changes, buffers, outside, text)

    def attempted(self, attempt: Callable[[], _T]) -> _T:
        """Return the result of ``attempt``, repeated with rows counted if it fails without.

        Raises:
            CaptureError: raised by the attempt; by the first one if both fail.
        """
        try:
            return attempt()
        except CaptureError as error:
            if not self.rows.seen:
                raise
            first = error
        # With a count, the program holds only for that count, so this is the last resort.
        self.rows.counted = True
        try:
            return attempt()
        except SPCompilerError:
            raise first from first.__cause__

    def settled(self, first: Export) -> tuple[Export, Settled]:
        """Decide what happens to the attributes that the forward changed in ``first``; may warn.

        Returns:
            The export to use, and the decision. If an attribute cannot be stored, buffers that the
            forward sets in its module must stay too: then the forward is exported again.
        """

        def repeat(values: Mapping[Key, Any]) -> Changes | None:
            with changed_attributes(self.model, values):
                try:
                    second = self.run()
                # The model's own code may raise anything if an attribute is not as it left it.
                except Exception:
                    return None
            return second.changes if second.text == first.text else None

        settled = settle(first.changes, repeat)
        # A forward may set a table and the length that it is for together, as for rotary
        # embeddings: if the table stays, so must the length. Sizes from before do not count, since
        # a counter may reach them by chance.
        for each in list(settled.stored):
            lengths = first.buffers.lost_sizes.get(each.path, set())
            if each.how == "decide" and type(each.leaves[0]) is int and each.leaves[0] in lengths:
                settled.stored.remove(each)
                settled.lost[str(each)] = str(first.changes.changed[each.path, each.name])
        known = {(each.path, each.name) for each in settled.stored}
        others = {path for path, name in first.changes.changed if (path, name) not in known}
        if any(path in others for path, _ in first.buffers.written):
            first = self.run(others)
        settled.lost.update(first.buffers.lost)
        warn_of_attributes(self.model, settled, first.outside)
        return first, settled


def open_shapes(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return dynamic shapes for an export: every dim of the inputs that is not 0 or 1."""
    shapes = ShapesCollection()
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            # torch specializes sizes 0 and 1: no graph holds both for them and for larger sizes.
            shapes[leaf] = {dim: Dim.AUTO for dim, size in enumerate(leaf.shape) if size > 1}
    return shapes.dynamic_shapes(model, tuple(args), dict(kwargs))


def _same_constants(one: ExportedProgram, other: ExportedProgram) -> bool:
    """Return whether constants made from data, as by ``torch.from_numpy``, are equal."""
    pairs = [(value, other.constants.get(name)) for name, value in one.constants.items()]
    return all(
        not isinstance(value, Tensor) or (isinstance(twin, Tensor) and torch.equal(value, twin))
        for value, twin in pairs
    )


def _name_all_users(module: GraphModule) -> None:
    """Complete the users of every node."""
    # Where export inlines a subgraph that it has split off at autocast or no_grad, the results of
    # the subgraph keep only their users outside of it.
    for part in (each for each in module.modules() if isinstance(each, GraphModule)):
        for node in part.graph.nodes:
            for source in node.all_input_nodes:
                source.users.setdefault(node)


def _unfreeze(graph: Graph) -> None:
    """Allow comparisons of sizes to be recorded after the export."""
    # Export freezes the ShapeEnv at its end; a comparison would be answered but not recorded.
    env = getattr(fake_mode_of(graph), "shape_env", None)
    if env is not None:
        env.frozen = False


def _write_eps(module: GraphModule) -> None:
    """Give norms the ``eps`` that their kernels take for operands of this dtype."""
    # Otherwise the graph would compute another function in float64, in which it is verified. Nodes
    # under the model's own autocast are still in subgraphs.
    for part in (each for each in module.modules() if isinstance(each, GraphModule)):
        for node in calls(part.graph, torch.ops.aten.rms_norm.default):
            values, shape, weight, eps = arguments(node).values()
            node.args = values, shape, weight, kernel_eps(eps, values.meta["val"].dtype)
            node.kwargs = {}


def kernel_eps(eps: float | None, dtype: torch.dtype) -> float:
    """Return the ``eps`` of ``torch.nn.functional.rms_norm``: torch rounds it to float32, which is
    also the precision of norms of half-precision operands."""
    if dtype == torch.float64:
        return torch.finfo(dtype).eps if eps is None else eps
    single = torch.finfo(torch.float32).eps if eps is None else eps
    return torch.tensor(single, dtype=torch.float32, device="cpu").item()


def refuse_text(leaves: Iterable[Any]) -> None:
    """Raise an error for ``str(x)`` and ``repr(x)`` of a traced tensor if the user could see
    them."""
    for leaf in leaves:
        if isinstance(leaf, str) and _TRACED.search(leaf):
            raise UnsupportedError(
                f"the model returns, or stores in an attribute, the text of a tensor: {leaf!r:.60}."
                " Its values are unknown while the model is captured; return or store the tensor "
                "itself, and make the text after the call"
            )
