"""Loading of the model of a command from its arguments."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import json
import math
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from sp_compiler.base.errors import ArgumentError, UnsupportedError, did_you_mean, expected_one_of
from sp_compiler.base.units import bytes_text
from sp_compiler.trace.arguments import ExampleInputs, checked_inputs

BATCH, SEQUENCE = 1, 1024
"""Sizes of the example inputs, unless the model has fewer positions."""
# Heads of transformers whose labels are one token each; the others' have shapes of their own.
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
        """What a result is about, such as "inputs: input_ids int64[1, 128]; float32"."""
        args, kwargs = self.example_inputs
        names = inspect.signature(self.model.forward).parameters
        # Behind the last name come further ones of ``*args``.
        named = [*zip_longest(list(names)[: len(args)], args, fillvalue="..."), *kwargs.items()]
        texts = [f"{name} {_input_text(value)}" for name, value in named]
        dtypes = dict.fromkeys(map(_dtype_name, self.model.parameters()))
        return f"inputs: {', '.join(texts)}; {', '.join(dtypes) or 'no parameters'}"


class Note(UserWarning):
    """What a command says on stderr beside its result."""


def _input_text(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{_dtype_name(value)}{[*value.shape]}"
    return repr(value) if isinstance(value, (int, float, str)) else type(value).__name__


def _dtype_name(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


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
        device: "meta" to build it without memory.

    Raises:
        ArgumentError: none or both are given, the name does not exist, sizes are given although the
            callable returns inputs, or a configuration's model does not fit in memory in float64.
        UnsupportedError: transformers is needed and not installed.
    """
    # Both at once could mean either, and a long run of the wrong model is worse than an error.
    if (source is None) == (preset is None):
        raise ArgumentError(
            "expected a model: package.module:callable, a config.json, or --preset NAME"
            + (", and only one of them" if source else "")
        )
    to_dtype = _dtype(dtype)
    if preset is not None:
        return _preset(preset, batch, sequence, to_dtype or torch.bfloat16, device)
    assert source is not None
    # A path may have a colon, as on Windows.
    if ":" in source and not Path(source).exists():
        made = _called(source, device)
    else:
        made = _configured(_read_config(Path(source)), device)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    for option, size in (("--batch", batch), ("--sequence", sequence)):
        if inputs is not None and size is not None:
            raise ArgumentError(
                f"{option} {size}: {source} returns inputs of its own; leave it out, or let it "
                "return the model alone"
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
    # Models with learned positions end at their last one.
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
        # As many as make the published global batch; a batch larger than that is one microbatch.
        max(1, preset["global_batch"] // batch),
    )


def _called(source: str, device: str) -> Any:
    module_name, _, name = source.partition(":")
    if module_name.endswith(".py"):
        module_name = _module_of(Path(module_name))
        raise ArgumentError(f"{source!r} is a file: write {module_name}:{name}")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ArgumentError(
            f"{module_name!r} is no name of a module: expected package.module:callable, found from "
            f"{Path.cwd()} and the installed packages"
        )
    # As ``python -m`` does: a model of the folder in which the command is run.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        raise ArgumentError(
            f"importing {module_name} ended the process (exit {error.code}): guard what it runs as "
            'a script with if __name__ == "__main__"'
        ) from error
    except ModuleNotFoundError as error:
        # A package that the user's module lacks is the user's own message to read.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ArgumentError(
            f"no module {error.name!r}: {source!r} is read as package.module:callable, from "
            f"{Path.cwd()} and the installed packages"
        ) from error
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        # Its own first: what it imports is rarely meant, and may be a hundred names.
        public.sort(key=lambda key: getattr(vars(module)[key], "__module__", "") != module_name)
        near = did_you_mean(name, public)
        raise ArgumentError(
            f"{module_name} has no callable {name!r}: {near}it has {', '.join(public)}"
        )
    _check_callable(source, function)
    try:
        with torch.device(device):
            return function()
    except SystemExit as error:  # its code would be this command's answer
        raise ArgumentError(
            f"{source} ended the process (exit {error.code}) where it should return a model"
        ) from error


def _check_callable(source: str, function: Callable[..., Any]) -> None:
    """Raise an error for what cannot be called without arguments."""
    if isinstance(function, nn.Module):
        raise ArgumentError(
            f"{source} is a model, made without the options of this command: expected a function "
            f"that makes it, or its class {type(function).__name__} if that needs no arguments"
        )
    if needed := _needed(function):
        raise ArgumentError(
            f"{source} needs {', '.join(needed)}: expected a callable without arguments"
        )


def _needed(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments without which ``function`` cannot be called."""
    with contextlib.suppress(ValueError):  # of a builtin, which has no signature
        parameters = inspect.signature(function).parameters.values()
        given = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [p.name for p in parameters if p.default is p.empty and p.kind not in given]
    return []


def _read_config(path: Path) -> dict[str, Any]:
    # The likely slips of somebody who knows other tools, which take a script or a module.
    if (python := _python_file(path)) is not None:
        # A module is imported from the current folder.
        folder = "" if python.resolve().is_relative_to(Path.cwd()) else f", in {python.parent}"
        raise ArgumentError(
            f"{path} is Python: expected {_module_of(python)}:callable{folder}, a function without "
            f"arguments or a class{_callables_text(python)}"
        )
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ArgumentError(
            f"no file {path}: expected package.module:callable, a HuggingFace config.json or a "
            "folder that has one, or --preset NAME"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArgumentError(f"{path} is no JSON: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    if isinstance(config, dict) and names is None and (name := _causal_model(config)):
        warnings.warn(Note(f'{path} has no "architectures": building {name}'), stacklevel=1)
        return {**config, "architectures": [name]}
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ArgumentError(
            f'{path} has no "architectures", a list with the class of transformers to build, such '
            'as ["LlamaForCausalLM"]'
        )
    assert isinstance(config, dict)
    return config


def _python_file(source: Path) -> Path | None:
    """Return the Python file that is meant by its path or by the name of its module, if any."""
    if (source / "config.json").exists():
        return None
    # From the current folder alone: an installed package of that name is hardly a model.
    module = source if source.is_dir() else Path(*str(source).split("."))
    files = (source, module / "__init__.py", Path(f"{module}.py"))
    return next((file for file in files if file.suffix == ".py" and file.is_file()), None)


def _module_of(file: Path) -> str:
    """Return the name by which a file is imported from the current folder, or else from its own."""
    parts = [file.stem]
    with contextlib.suppress(ValueError):
        parts = [*file.resolve().relative_to(Path.cwd()).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _callables_text(file: Path) -> str:
    """Return what a Python file has of callables without arguments, for an error message."""
    # Read, not imported: a script would run.
    try:
        statements = ast.parse(file.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError):
        return ""
    names = [each.name for each in statements if _may_make_a_model(each)]
    found = " or ".join(f"{_module_of(file)}:{name}" for name in names[:5])
    return found and f", such as {found}"


def _may_make_a_model(statement: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.ClassDef]:
    """Return whether it defines a public function, or a class with a forward, that needs no
    arguments."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name[0] != "_" and not _needs_arguments(statement, given=0)
    if not isinstance(statement, ast.ClassDef):
        return False
    methods = {each.name: each for each in statement.body if isinstance(each, ast.FunctionDef)}
    own = methods.get("__init__")
    return "forward" in methods and (own is None or not _needs_arguments(own, given=1))


def _needs_arguments(function: ast.FunctionDef, *, given: int) -> bool:
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    return positional > given or None in arguments.kw_defaults


def _causal_model(config: Mapping[str, Any]) -> str | None:
    """The class that ``AutoModelForCausalLM`` builds of ``config``, which a configuration that was
    saved without a model does not name."""
    with contextlib.suppress(ImportError):
        from transformers.models.auto import modeling_auto

        names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        name: str | None = names.get(config.get("model_type"))
        return name
    return None


def _configured(config: dict[str, Any], device: str) -> nn.Module:
    """Return the transformers model of ``config``, with new weights."""
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            "presets and config.json need transformers: pip install 'sp-compiler[examples]'"
        ) from error
    # HuggingFace writes a list, which has one class.
    (name, *_) = config["architectures"]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        near = did_you_mean(name, dir(transformers))
        raise ArgumentError(
            f"transformers {transformers.__version__} has no class {name}: {near}expected that of "
            "a model, such as LlamaForCausalLM"
        )
    if not (isinstance(model_class, type) and hasattr(model_class, "config_class")):
        raise ArgumentError(f"{name} of transformers is no model, such as LlamaForCausalLM")
    # Before transformers reads it, whose error names no field.
    dtype = _dtype(config.get("dtype", config.get("torch_dtype")))
    fields = {key: value for key, value in config.items() if key != "architectures"}
    # A cache of keys and values is for generation, and would be switched off with a word.
    known = model_class.config_class(**{**fields, "use_cache": False})
    if device != "meta":
        with torch.device("meta"):
            _check_memory(model_class(known))
    with torch.device(device):
        model: nn.Module = model_class(known)
    return model if dtype is None else model.to(dtype)


def _check_memory(model: nn.Module) -> None:
    # Numbers are compared in float64, whatever the model's own dtype.
    needed = 8 * sum(parameter.numel() for parameter in model.parameters())
    free = _free_bytes()
    if needed > free:
        raise ArgumentError(
            f"the parameters of {type(model).__name__} take {bytes_text(needed)} in float64, and "
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
    # The vocabulary is not asked for: 0 is a token of every one.
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device=device)
    labelled = "labels" in parameters and type(model).__name__.endswith(_TOKEN_LABELS)
    return (), {"input_ids": ids, **({"labels": ids} if labelled else {})}


def _dtype(name: object) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(
            f"dtype {name!r}: expected a floating point dtype of torch, such as bfloat16"
        )
    return dtype
