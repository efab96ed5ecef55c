"""Loading of a command's model from its arguments."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sp_compiler.base.errors import ArgumentError, UnsupportedError, did_you_mean, expected_one_of
from sp_compiler.base.units import bytes_text
from sp_compiler.command_line.config_file import module_of, read_config
from sp_compiler.command_line.messages import UsageError
from sp_compiler.ir.text import dtype_name
from sp_compiler.trace.arguments import ExampleInputs, checked_inputs

BATCH, SEQUENCE = 1, 1024
"""Sizes of the example inputs, unless the model has fewer positions."""
# Heads of transformers that take one label per token; labels of others have different shapes.
_TOKEN_LABELS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True)
class Loaded:
    """A model with example inputs, and its usual options."""

    model: nn.Module
    example_inputs: ExampleInputs
    tp: int | None = None
    pp: int = 1
    microbatches: int = 1

    @property
    def inputs_text(self) -> str:
        """The inputs of a result, such as "inputs: input_ids int64[1, 128]; float32"."""
        args, kwargs = self.example_inputs
        names = inspect.signature(self.model.forward).parameters
        # Arguments after the last name are elements of ``*args``.
        named = [*zip_longest(list(names)[: len(args)], args, fillvalue="..."), *kwargs.items()]
        texts = [f"{name} {_input_text(value)}" for name, value in named]
        dtypes = dict.fromkeys(dtype_name(each.dtype) for each in self.model.parameters())
        return f"inputs: {', '.join(texts)}; {', '.join(dtypes) or 'no parameters'}"


def _input_text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{[*value.shape]}"
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def presets() -> dict[str, dict[str, Any]]:
    """Presets by name, see ``presets.toml``."""
    # As package data: an installed wheel may be a zip file.
    text = files("sp_compiler.command_line").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def load(
    source: str | None,
    preset: str | None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    device: str = "meta",
) -> Loaded:
    """Build the model of ``source`` or ``preset`` on ``device``.

    Args:
        source: ``package.module:callable``, or the path of a HuggingFace ``config.json`` or of its
            folder. The callable returns the model, or the model and (args, kwargs).
        preset: a name in :func:`presets`.
        batch: number of sequences in the example inputs, if the callable returns none.
        sequence: number of tokens per sequence.
        dtype: dtype of the parameters, such as "bfloat16"; ``None`` for the model's own.
        device: "meta" to build the model without memory.

    Raises:
        UsageError: none or both are given, or ``source`` is neither of these.
        ArgumentError: the name does not exist, sizes are given although the
            callable returns inputs, or a configuration's model does not fit in memory in float64.
        UnsupportedError: transformers is needed and not installed.
    """
    # Either could be meant, and a long run of the wrong model is worse than an error.
    if source is not None and preset is not None:
        raise UsageError(f"{source} and --preset {preset} are both models: give one of them")
    if source is None and preset is None:
        raise UsageError(
            "expected a model: package.module:callable, a config.json, or --preset NAME"
        )
    to_dtype = _dtype("--dtype", dtype)
    if preset is not None:
        return _preset(preset, batch, sequence, to_dtype or torch.bfloat16, device)
    assert source is not None
    # A path may have a colon, as on Windows.
    if ":" in source and not Path(source).exists():
        made = _called(source, device)
    else:
        made = _configured(read_config(Path(source)), device)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for option, size in (("--batch", batch), ("--sequence", sequence)):
        if inputs is not None and size is not None:
            raise ArgumentError(
                f"{option} {size}: {source} returns its own inputs; leave {option} out, or let the "
                "callable return only the model"
            )
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"{source} returned an object of type {type(model).__name__}: expected a "
            "torch.nn.Module, or a tuple of one and (args, kwargs)"
        )
    if inputs is not None:
        try:
            inputs = checked_inputs(model, inputs)
        except ArgumentError as error:
            raise ArgumentError(f"{source} returned a model and inputs; {error}") from error
    # After the callable, which need not know of the option.
    model = model if to_dtype is None else model.to(to_dtype)
    # A model with learned positions cannot take longer sequences.
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None) or SEQUENCE
    length = sequence or min(SEQUENCE, most)
    return Loaded(model, inputs or _example(model, batch or BATCH, length, device))


def _preset(
    name: str, batch: int | None, sequence: int | None, dtype: torch.dtype, device: str
) -> Loaded:
    known = presets()
    if name not in known:
        raise ArgumentError(f"--preset {name}: {expected_one_of(name, known)}")
    preset = known[name]
    batch, sequence = batch or preset["batch"], sequence or preset["sequence"]
    model = _configured({"architectures": [preset["family"]], **preset["config"]}, device)
    return Loaded(
        model.to(dtype),
        _example(model, batch, sequence, device),
        preset["tp"],
        preset["pp"],
        # Enough for the published global batch; a larger batch is one microbatch.
        max(1, preset["global_batch"] // batch),
    )


def _called(source: str, device: str) -> Any:
    module_name, _, name = source.partition(":")
    if module_name.endswith(".py"):
        module_name = module_of(Path(module_name))
        raise ArgumentError(f"{source!r} is a file: write {module_name}:{name}")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise UsageError(
            f"{module_name!r} is not a module name: expected package.module:callable, found in "
            f"{Path.cwd()} or the installed packages"
        )
    # As ``python -m`` does, so that a model in the current folder is found.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise ArgumentError(
            f"importing {module_name} ended the process (exit {error.code}): guard the code that "
            'it runs as a script with if __name__ == "__main__"'
        ) from error
    except ModuleNotFoundError as error:
        # If the user's module lacks a package, the user needs Python's own message.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"no module {error.name!r}: {source!r} is read as package.module:callable, found in "
            f"{Path.cwd()} or the installed packages"
        ) from error
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        # Its own names first: imported ones are rarely meant, and may be a hundred.
        public.sort(key=lambda key: getattr(vars(module)[key], "__module__", "") != module_name)
        near = did_you_mean(name, public)
        raise ArgumentError(
            f"{module_name} has no callable {name!r}: {near}it has {', '.join(public)}"
        )
    _check_callable(source, function)
    try:
        with torch.device(device):
            return function()
    except SystemExit as error:  # its exit code would become this command's
        raise ArgumentError(
            f"{source} ended the process (exit {error.code}) instead of returning a model"
        ) from error


def _check_callable(source: str, function: Callable[..., Any]) -> None:
    """Raise an error unless ``function`` can be called without arguments to build a model."""
    if isinstance(function, nn.Module):
        raise ArgumentError(
            f"{source} is a model, built without the options of this command: expected a function "
            f"that builds it, or its class {type(function).__name__} if that needs no arguments"
        )
    if needed := _needed(function):
        raise ArgumentError(
            f"{source} needs {', '.join(needed)}: expected a callable without arguments"
        )


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the required arguments of ``function``."""
    with contextlib.suppress(ValueError):  # a builtin has no signature
        parameters = inspect.signature(function).parameters.values()
        given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in parameters if p.default is p.empty and p.kind not in given]
    return []


def _configured(config: dict[str, Any], device: str) -> nn.Module:
    """Return the transformers model of ``config``, with new weights."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            "presets and config.json need transformers: pip install 'sp-compiler[examples]'"
        ) from error
    # HuggingFace writes a list with one class.
    (name, *_) = config["architectures"]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        near = did_you_mean(name, dir(transformers))
        raise ArgumentError(
            f"transformers {transformers.__version__} has no class {name}: {near}expected that of "
            "a model, such as LlamaForCausalLM"
        )
    if not (isinstance(model_class, type) and hasattr(model_class, "config_class")):
        raise ArgumentError(
            f"{name} of transformers is not a model: expected one such as LlamaForCausalLM"
        )
    # Before transformers reads it, as its error does not name the field.
    field = "dtype" if "dtype" in config else "torch_dtype"
    dtype = _dtype(f"the configuration's {field}", config.get(field))
    fields = {key: value for key, value in config.items() if key != "architectures"}
    # A key/value cache is for generation; transformers would switch it off with a warning.
    known = model_class.config_class(**{**fields, "use_cache": False})
    if device != "meta":
        with torch.device("meta"):
            _check_memory(model_class(known))
    with torch.device(device):
        model: nn.Module = model_class(known)
    return model if dtype is None else model.to(dtype)


def _check_memory(model: nn.Module) -> None:
    # Results are compared in float64, whatever the model's own dtype.
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())
    free = _free_bytes()
    if needed > free:
        raise ArgumentError(
            f"the parameters of {type(model).__name__} take {bytes_text(needed)} in float64, but "
            f"{bytes_text(int(free))} of memory are free: give a config.json with fewer layers and "
            "a smaller vocab_size and hidden_size"
        )


def _free_bytes() -> float:
    """Return the memory available without swapping, if the system reports it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    sizes = (line.split() for line in lines)
    return next((int(size[1]) * 1024 for size in sizes if size[0] == "MemAvailable:"), math.inf)


def _example(model: nn.Module, batch: int, sequence: int, device: str) -> ExampleInputs:
    """Return a batch of tokens, with labels if the model computes a loss from them."""
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise ArgumentError(
            f"{type(model).__name__}.forward takes {', '.join(parameters)} and no input_ids: let "
            "the callable return (model, (args, kwargs))"
        )
    # Token 0 exists in every vocabulary.
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device=device)
    labelled = "labels" in parameters and type(model).__name__.endswith(_TOKEN_LABELS)
    return (), {"input_ids": ids, **({"labels": ids} if labelled else {})}


def _dtype(argument: str, name: object) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(
            f"{argument} {name!r}: expected a floating point dtype of torch, such as bfloat16"
        )
    return dtype
