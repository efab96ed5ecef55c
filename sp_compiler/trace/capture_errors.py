"""Errors that tell a user why a model could not be captured, and what to do."""

from __future__ import annotations

import re
import traceback
from types import TracebackType

from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from sp_compiler.base.errors import CaptureError, UnsupportedError
from sp_compiler.base.warn import in_library
from sp_compiler.trace.decisions import Reads, is_data_dependent

ADVICE = "what to do: "
"""Beginning of the last line of an error of the capture."""

# How torch's errors name an operator whose arguments are functions: two forms.
_HIGHER_ORDER = re.compile(
    r"Higher Order Operator: (?:torch\.(?:ops\.higher_order\.)?)?(\w+)|HigherOrderOperator (\w+)"
)

# Torch 2.11 fails only where it compares an object of an unknown class with a constant.
_UNKNOWN_CLASS = ("register a pytree", "register_dataclass", "unhashable type")
_REGISTER = (
    "inputs and outputs of forward must be tensors, numbers, strings and None in tuples, lists, "
    "dicts and ModelOutputs; for a class of your own call "
    "torch.export.register_dataclass(YourClass) once before compiling. A class that registers "
    "itself must be imported, and made once, outside of forward: libraries do not register while a "
    "model is captured"
)


def capture_error(
    model: nn.Module, error: Exception, reads: Reads
) -> CaptureError | UnsupportedError:
    """Turn an exception of the export into an error that a user can act on."""
    where = _user_frame(model, error.__traceback__)
    if isinstance(error, UnsupportedError):
        return UnsupportedError(f"{error}\n{where}".rstrip())
    text = (str(error).strip().splitlines() or [""])[0]
    if is_data_dependent(error):
        # Torch's text is about its internal symbols. Without a read, a shape is unknown.
        known = "a branch, loop or size in the forward depends on the values in a tensor"
        line = where.strip().rpartition("\n")[2].strip()
        text = reads.text() if reads.refused is not None else f"{known}: {line}"
        advice = (
            "choose with torch.where, or compute the number from inputs, buffers, shapes and "
            "arguments; a check (assert, isnan) belongs outside of forward"
        )
        return CaptureError(f"{text}\n{where}  {ADVICE}{advice}")
    text, advice = _explained(error, text)
    return CaptureError(
        f"the model could not be captured as one graph: {type(error).__name__}: {text}\n"
        f"{where}  {ADVICE}{advice}"
    )


def _explained(error: Exception, text: str) -> tuple[str, str]:
    """Return a message for an error whose first line is ``text``, and what to do about it."""
    advice = (
        "the model's forward must run as it is on these inputs; run it once without compiling. If "
        "that works, look for torch.compiler.is_compiling() in it, which is True here"
    )
    if isinstance(error, DynamicOutputShapeException):  # lstsq
        text = f"the size of a result of {error.func} depends on the values in a tensor"
        advice = "let the model return the operands, and call this operator outside of forward"
    if ".numpy()" in text:
        advice = (
            "a traced tensor has no values for NumPy; compute with torch's functions in forward"
        )
    if "fake tensor in the exported program" in text:
        text = (
            "the tracer missed a value, such as a gradient computed in forward or a dim moved by "
            "out_dims of torch.vmap"
        )
        advice = (
            "compute gradients outside of forward; move a dim of torch.vmap's result with movedim"
        )
    # torch internals: aot_export_joint_simple and similar functions, for arguments with one base.
    if "expected compiled_fn to be GraphModule" in text:
        text = "forward writes into a tensor that shares memory with another of its arguments"
        advice = (
            "pass a copy (clone()) of one of them, or make one from the other in forward; for an "
            "embedding with max_norm, which writes into its weight, rescale that outside of forward"
        )
    if named := _HIGHER_ORDER.search(str(error)):
        text = f"{named[1] or named[2]} calls functions, inside which sharding rules do not apply"
        advice = (
            "compute both sides and choose with torch.where; write a loop over tokens in Python"
        )
    if any(each in str(error) for each in _UNKNOWN_CLASS):
        advice = _REGISTER
    return text, advice


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` without the frames of PyTorch and sp_compiler around the user's frames.

    Between two calls of a model's modules there are a dozen frames of the capture, which are of no
    use to a user.
    """
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    own = [not in_library(f.tb_frame.f_code.co_filename) for f in frames]
    kept: TracebackType | None = None
    for index in reversed(range(len(frames))):
        # All frames after the user's last one stay: they are where it failed.
        if own[index] or not any(own[index:]):
            frame = frames[index]
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _user_frame(model: nn.Module, trace: TracebackType | None) -> str:
    """Return the module path and source line of the innermost frame inside a forward of the user's
    model, and the innermost line of a function called there, unless it is PyTorch's.
    """
    names = {id(module): name for name, module in model.named_modules()}
    text = inner = ""
    # Outermost first: the last match is kept.
    for frame, line in traceback.walk_tb(trace):
        filename = frame.f_code.co_filename
        first = frame.f_code.co_varnames[:1]  # the name that the user gave to "self"
        owner = frame.f_locals.get(first[0]) if first else None
        if in_library(filename):
            continue
        source = traceback.FrameSummary(filename, line, frame.f_code.co_name).line
        at = f"    {filename}:{line}: {source}\n"
        if id(owner) in names:
            path = names[id(owner)] or "(model)"
            text, inner = f"  module: {path} ({type(owner).__name__})\n{at}", ""
        else:
            inner = at
    return f"{text}{inner}" if text else ""
