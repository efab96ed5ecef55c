"""Checks of a model and its example inputs, as a user passes them, before the export."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any

import numpy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy

from sp_compiler.base.errors import ArgumentError, CaptureError
from sp_compiler.ir.text import describe_tensor
from sp_compiler.trace.capture_errors import ADVICE

ExampleInputs = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and keyword arguments of a call of the model."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, FullyShardedDataParallel)
_INPUTS = "inputs are tensors, numbers, text and None, in lists, tuples and dicts"


def check_model(model: Any) -> None:
    """Raise :class:`ArgumentError` unless ``model`` is a complete module that is not parallelised
    otherwise."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={type(model).__name__}: expected a torch.nn.Module")
    over_data = (
        "for data parallelism, pass compile a mesh with an axis dp_replicate (as "
        "DistributedDataParallel does) or dp_shard (as FSDP does) in addition to tp"
    )
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        if isinstance(module, _WRAPPERS):
            raise ArgumentError(
                f"{where} is wrapped in {type(module).__name__}: compile the model inside it, "
                f"{where}.module; {over_data}"
            )
        # FSDP2 changes the class of the module itself. A module compiled by sp_compiler gets a more
        # specific error later.
        if isinstance(module, FSDPModule) and not hasattr(module, "_sp_layout"):
            raise ArgumentError(
                f"fully_shard or replicate was applied to {where}: compile the model without it; "
                f"{over_data}"
            )
        # The attribute identifies torch.compile's wrapper, whose class is private.
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise ArgumentError(
                f"{where} is wrapped by torch.compile: compile the model inside it, "
                f"{where}._orig_mod, or use torch.compile(..., backend='sp_compiler') instead"
            )
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            if is_lazy(value):
                raise ArgumentError(
                    f"{where} ({type(module).__name__}) has no shape for its {key} yet: call the "
                    "model once before it is compiled"
                )


def checked_inputs(model: Any, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``example_inputs`` if they are valid.

    Raises:
        ArgumentError: ``model`` is not a module, or the inputs are not (args, kwargs) of a call.
    """
    check_model(model)
    if (
        not isinstance(example_inputs, tuple)
        or len(example_inputs) != 2
        or not isinstance(example_inputs[0], (tuple, list))
        or not isinstance(example_inputs[1], Mapping)
    ):
        got = type(example_inputs).__name__
        if isinstance(example_inputs, tuple):
            kinds = [type(value).__name__ for value in example_inputs]
            got = f"({kinds[0]},)" if len(kinds) == 1 else f"({', '.join(kinds)})"
        raise ArgumentError(
            "example_inputs: expected (args, kwargs), a tuple of a tuple and a dict, such as "
            f"((), {{'input_ids': ids}}) or ((x, y), {{}}); got {got}"
        )
    # Copies, since a caller may change its own afterwards.
    args, kwargs = tuple(example_inputs[0]), dict(example_inputs[1])
    bound_call(model.forward, args, kwargs, "example_inputs")
    return args, kwargs


def bound_call(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], caller: str
) -> inspect.BoundArguments:
    """Bind the arguments of a call of a model's ``forward``.

    Args:
        caller: name of the source of the arguments, for the error.

    Raises:
        ArgumentError: ``forward`` does not take them.
    """
    signature = inspect.signature(forward)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{caller}: {error}; the model's forward takes {signature}") from None


def unordered_keywords(forward: Callable[..., Any]) -> Container[str] | None:
    """Return the keyword arguments whose order ``forward`` cannot see; ``None`` for all.

    Arguments collected by ``**modalities`` are a dict in the order of the call.
    """
    parameters = inspect.signature(forward).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    # By kind: for ``forward(x, /, **more)`` a keyword may be named ``x`` or ``more``.
    by_keyword = {
        each.name
        for each in parameters
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    }
    return by_keyword if takes_any else None


def sorted_keywords(kwargs: Mapping[str, Any], unordered: Container[str] | None) -> dict[str, Any]:
    """Return ``kwargs`` in an order that is the same for equivalent calls: those in ``unordered``
    sorted by name, then the others in the given order; ``None``: all sorted by name."""
    if unordered is None:
        return dict(sorted(kwargs.items()))
    others = {name: value for name, value in kwargs.items() if name not in unordered}
    return {name: kwargs[name] for name in sorted(kwargs) if name not in others} | others


def refuse_inputs(names: Sequence[str], leaves: Sequence[Any]) -> None:
    """Raise :class:`ArgumentError` for an input that is a NumPy array or a module."""
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, numpy.ndarray):
            raise ArgumentError(
                f"{name} is a NumPy array of {leaf.dtype} {leaf.shape}: pass torch.from_numpy(...)"
            )
        if isinstance(leaf, nn.Module):
            raise ArgumentError(
                f"{name} is a module ({type(leaf).__name__}): {_INPUTS}; make it an attribute of "
                "the model before it is compiled"
            )


def refused_by_export(
    error: Exception, names: Sequence[str], leaves: Sequence[Any]
) -> CaptureError | None:
    """Return an error that names the input whose class ``torch.export`` does not accept, if that
    is the reason of ``error``."""
    for name, leaf in zip(names, leaves, strict=True):
        if str(error).startswith(f"Unsupported input type {type(leaf)}"):
            return CaptureError(
                f"{name} is of {type(leaf)}: {_INPUTS}\n  {ADVICE}pass the parts of it that "
                "forward needs; "
                "for a class of your own call torch.export.register_dataclass(YourClass) once "
                "before compiling, or torch.utils._pytree.register_pytree_node for a container"
            )
    return None


def argument_text(value: Any) -> str:
    """Return a short text for the value of an argument: ``int64 (2, 96)``, ``list [3, 5]``.

    It has the dtype and the shape of a tensor, else the type and the beginning of the value.
    """
    text = _text(value)
    if isinstance(value, (Mapping, list, tuple)):
        text = f"{type(value).__name__} {text}"
    return textwrap.shorten(text, 100, placeholder=" ...")


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe_tensor(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, (type(None), int, float, str)) else type(value).__name__


def about_arguments(
    error: CaptureError,
    arguments: Mapping[str, str],
    latest: Mapping[str, str],
    known: Collection[str],
) -> CaptureError:
    """Return ``error`` with notes about the arguments of the call.

    Args:
        error: raised by the capture.
        arguments: the text of each argument by name.
        latest: the same for the call that was compiled last; empty if there is none.
        known: names in the signature of the model's forward.
    """
    unnamed = [name for name in arguments if name not in known]
    differences = [
        f"{name} is {text}, and was {latest.get(name, 'not given')}"
        for name, text in arguments.items()
        if latest and latest.get(name) != text
    ]
    said, _, rest = f"{error}\n".partition(f"  {ADVICE}")
    said, rest = said.rstrip(), rest.rstrip()
    if unnamed:
        said += f"\n  arguments that forward takes under any name: {', '.join(unnamed)}"
    if differences:
        said += f"\n  compiled for other arguments: {'; '.join(differences)}"
        rest = f"pass arguments as in the previous call; if these are intended, {rest}"
    return CaptureError(f"{said}\n  {ADVICE}{rest}" if rest else said)
