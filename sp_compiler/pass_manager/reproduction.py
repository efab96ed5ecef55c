"""Reproduction of a failed compilation: a folder with its captured graph, its options and a
script."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions

from sp_compiler.base.errors import (
    ArgumentError,
    CaptureError,
    NotCompiledError,
    RankFailureError,
    RankMismatchError,
    UnsupportedError,
)
from sp_compiler.base.log import LOG
from sp_compiler.base.placement import Placement
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.fx import calls
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.dump import VARIABLE, dump_folder, own_folder
from sp_compiler.pass_manager.reproduction_script import script_text
from sp_compiler.rules.custom import user_rule
from sp_compiler.rules.registry import schema_name
from sp_compiler.trace.arguments import unordered_keywords
from sp_compiler.trace.autograd_functions import function_name
from sp_compiler.trace.export import capture, flatten_inputs

SAVED = "failed.pickle"
NOTE = "To reproduce this error"
"""Beginning of the note that a failed compilation adds to its error."""

# Their messages are enough: the user changes an argument or the model.
_FOR_THE_USER = (
    ArgumentError,
    CaptureError,
    NotCompiledError,
    RankFailureError,
    RankMismatchError,
    UnsupportedError,
)


@dataclass(frozen=True)
class FailedCompilation:
    """Everything on which a compilation depends after its capture.

    Attributes:
        name: name of the model's class.
        captured: the graph as it was captured, before any pass.
        options: options of the compilation.
        fixed: placements of parameters that an earlier compilation decided.
        verify: whether its results were compared, as in ``compile(verify=True)``.
        inputs: leaves of the example inputs, with their values.
        buffers: buffers that the graph reads, by name, with their values; parameters have no values
            here.
        rules: arguments of :func:`sp_compiler.rule` for the operators of the graph.
    """

    name: str
    captured: Captured
    options: CompileOptions
    fixed: Mapping[str, Placement]
    verify: bool
    inputs: Sequence[Any]
    buffers: Mapping[str, Tensor]
    rules: Sequence[tuple[tuple[str, str], dict[str, Any]]]

    def save(self, path: Path) -> None:
        """Write it to ``path``.

        Raises:
            Exception: from pickle, if the graph or an option cannot be pickled.
        """
        # By default the pickler refuses operators other than ATen's and drops the names of the
        # layers, because its files are meant for caches that other programs read.
        options = PicklerOptions(ops_filter=None, node_metadata_key_filter=None)
        path.write_bytes(GraphPickler.dumps(self, options))

    @classmethod
    def load(cls, path: Path) -> FailedCompilation:
        """Read a file of :meth:`save`; like any pickle, it can run arbitrary code."""
        loaded = GraphPickler.loads(path.read_bytes(), FakeTensorMode())
        assert isinstance(loaded, cls)
        return loaded


@contextlib.contextmanager
def reproducible(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    fixed: Mapping[str, Placement],
    *,
    verify: bool = False,
) -> Iterator[None]:
    """Context that adds a note to errors of the compiler, or of a user's pass or rule: how to
    reproduce them.

    If ``SP_COMPILER_DUMP`` is set, the files are written to a folder there; else the note says how
    to get them.
    """
    try:
        yield
    except _FOR_THE_USER:
        raise
    except Exception as error:
        if not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
            # A failure in here must not hide the error itself.
            try:
                note = _written(error, model, args, kwargs, options, fixed, verify=verify)
            except Exception as other:
                note = f", the model itself is needed ({type(other).__name__}: {other})"
            error.add_note(NOTE + note)
        raise


def _written(
    error: Exception,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: CompileOptions,
    fixed: Mapping[str, Placement],
    *,
    verify: bool,
) -> str:
    """Write the folder if it is wanted; return the rest of the note."""
    root = dump_folder()
    if root is None:
        return f": run with {VARIABLE}=FOLDER in the environment, which writes a script that does"
    # Captured again: passes rewrite the capture in place, and a copy would cost time in every
    # compilation that succeeds.
    captured = capture(model, args, kwargs)
    names = [ref.name for ref in captured.refs if ref.kind == "buffer"]
    for node in calls(captured.module.graph, torch.ops.sp_compiler_function.apply.default):
        raise UnsupportedError(
            f"{function_name(node.args[1])}.apply runs code that no file can hold"
        )
    # Functions inside of registered operators are recorded too; the graph only names the operators.
    captured.functions = ()
    leaves, _ = flatten_inputs(args, kwargs, unordered_keywords(model.forward))
    targets = {node.target: schema_name(node) for node in captured.module.graph.nodes}
    rules = map(user_rule, dict.fromkeys(targets.values()))
    failed = FailedCompilation(
        type(model).__name__,
        captured,
        options,
        fixed,
        verify,
        [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        {name: model.get_buffer(name).detach() for name in names},
        [rule for rule in rules if rule is not None],
    )
    folder = own_folder(root, suffix="-failed")
    text = "".join(traceback.format_exception(error))
    (folder / "error.txt").write_text(text, encoding="utf-8")
    failed.save(folder / SAVED)
    script = folder / "reproduce.py"
    operators = [target for target in targets if isinstance(target, OpOverload)]
    used = [*options.passes, *operators]
    script.write_text(script_text(error, used), encoding="utf-8")
    LOG.info("wrote files that reproduce the error to %s", folder)
    return f": python {script}"
