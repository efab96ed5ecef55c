"""Code shared by all commands that take a model: arguments, errors, progress, exit codes."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import inspect
import io
import logging
import os
import re
import sys
import traceback as traceback_module
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.markup import escape

from sp_compiler.api import compile as compile_model
from sp_compiler.base.errors import ArgumentError, CaptureError, SPCompilerError, expected_one_of
from sp_compiler.base.log import VARIABLE as LOG_VARIABLE
from sp_compiler.command_line.messages import Note, UsageError
from sp_compiler.command_line.models import SEQUENCE, Loaded, load, presets
from sp_compiler.options import Options
from sp_compiler.trace.capture_errors import ADVICE

# Separate codes, so that a CI job can tell "no" from "could not find out"; typer itself uses 2.
FAILED, USAGE, BROKEN = 1, 2, 3
"""Exit codes: the answer is no; wrong usage; the model could not be compiled."""


def _preset_names() -> list[str]:
    return list(presets())


_OBJECTS = ("hints", "passes")
_OPTIONS = [name for name in Options.__annotations__ if name not in _OBJECTS]
"""Names that ``-o`` takes: all options except those whose values are Python objects."""
_OTHER_WAYS = {
    "tp": "give --tp",
    "mesh": "plan has --mesh",
    "verify": "it is a command, sp-compiler verify",
    "example_inputs": "let the callable return (model, (args, kwargs))",
    **dict.fromkeys(_OBJECTS, "its values are Python objects; call sp_compiler.compile or plan"),
}


def _option_names() -> list[str]:
    return [f"{name}=" for name in _OPTIONS]


@dataclass(frozen=True)
class Request:
    """Arguments of all commands that work on a model; each field is an option of the command."""

    model: Annotated[
        str | None,
        typer.Argument(help="package.module:callable, or a HuggingFace config.json or its folder."),
    ] = None
    preset: Annotated[
        str | None,
        typer.Option(help="A model by name, such as llama-3-8b.", autocompletion=_preset_names),
    ] = None
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="Tensor-parallel ranks; the preset's or 8; verify: 2."),
    ] = None
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a microbatch; the preset's or 1.")
    ] = None
    sequence: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Tokens per sequence; the preset's, or {SEQUENCE} or the model's maximum.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="Of the parameters; the model's own, or bfloat16 for a preset."),
    ] = None
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            help="An option of compile, as NAME=VALUE: -o recompute=full. Repeatable.",
            autocompletion=_option_names,
        ),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="JSON for a program to read.")] = False
    traceback: Annotated[bool, typer.Option("--traceback", help="Show Python tracebacks.")] = False

    def load(self, device: str = "meta") -> Loaded:
        """Build the model on ``device``."""
        # Usage errors are raised before the model is built, which may take minutes.
        _ = self.options
        # On the meta device it takes only seconds, which need no line in a log.
        with progress("building the model", is_long=device != "meta"):
            return load(
                self.model,
                self.preset,
                batch=self.batch,
                sequence=self.sequence,
                dtype=self.dtype,
                device=device,
            )

    def ranks(self, loaded: Loaded) -> int:
        """Number of tensor-parallel ranks."""
        # 8: a machine usually has 8 devices with fast links between them.
        return self.tp or loaded.tp or 8

    @property
    def options(self) -> Any:
        """Options of the compilation, as ``compile`` takes them."""
        pairs = [text.partition("=") for text in self.option or ()]
        # Checked here, where the spelling of the option is known; compile checks the values.
        for name, equals, _ in pairs:
            if not equals:
                raise ArgumentError(f"-o {name}: expected NAME=VALUE, such as recompute=full")
            _check_option(name)
        names = [name.replace("-", "_") for name, _, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"-o {name} is given {names.count(name)} times: give it once")
        # Both forms: command-line options have hyphens, those of compile underscores.
        return {name: _value(text) for name, (_, _, text) in zip(names, pairs, strict=True)}


def _check_option(text: str) -> None:
    """Raise an error for a name that is not an option of the compilation."""
    name = text.replace("-", "_")
    if name in _OPTIONS:
        return
    if name in _OTHER_WAYS:
        raise ArgumentError(f"-o {text}: {_OTHER_WAYS[name]}")
    if name in inspect.signature(compile_model).parameters:
        raise ArgumentError(f"-o {text}: an option of compile for training; no command takes it")
    raise ArgumentError(f"-o {text}: {expected_one_of(name, _OPTIONS)}")


def _value(text: str) -> Any:
    # A Python literal such as a number, True or a dict; anything else is a string.
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command from ``function(request, *, own options)``, so that typer sees all options.

    Errors are one line, or two with a hint, and end with :data:`BROKEN`.
    """
    # Typer reads one flat signature, and seven commands would repeat these options.
    hints = get_type_hints(Request, include_extras=True)
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    shared = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(Request).parameters.items()
    ]
    # Positional ones first: the model, then the command's own arguments.
    parameters = [*shared[:1], *own, *shared[1:]]

    @functools.wraps(function)
    def run(**values: Any) -> None:
        request = Request(**{name: values.pop(name) for name in hints})
        with failures(function.__name__, traceback=request.traceback):
            function(request, **values)

    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


class Refused(Exception):
    """The answer is no; the text says why."""


@contextlib.contextmanager
def failures(name: str, *, traceback: bool) -> Iterator[None]:
    """Context that turns an error of a command into one line, a hint and an exit code."""
    errors = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    # A plan lists what compile warns of, and torch logs pages when it cannot capture a model.
    silence = contextlib.nullcontext() if traceback else _silence()
    try:
        with warnings.catch_warnings(), silence:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", Note)
            warnings.showwarning = lambda text, *_, **__: errors.print(str(text), markup=False)
            yield
    except typer.Exit:
        raise
    # On stderr, so that stdout has only a table or JSON.
    except Refused as no:
        errors.print(str(no), markup=False)
        raise typer.Exit(FAILED) from no
    except Exception as error:
        if traceback:
            errors.print(traceback_module.format_exc(), markup=False)
        lines = (str(error).strip() or type(error).__name__).splitlines()
        kind = "" if isinstance(error, SPCompilerError) else f"{type(error).__name__}: "
        # Validation of configurations names the field in one line and the problem in the next.
        num_shown = 2 if lines[0].endswith(":") else 1
        shown = " ".join(line.strip() for line in lines[:num_shown]) + _place(error)
        is_cut = len(lines) > 1 and not traceback
        errors.print(f"[bold red]error:[/] {escape(kind + shown)}")
        if hint := _hint(name, error, is_cut):
            errors.print(f"[bold]hint:[/] {escape(hint)}")
        for note in getattr(error, "__notes__", ()):
            errors.print(f"[bold]note:[/] {escape(note)}")
        raise typer.Exit(USAGE if isinstance(error, ArgumentError) else BROKEN) from error


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        # A log of passes, if the user asked for it, goes to stderr too.
        if not os.environ.get(LOG_VARIABLE):
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        # Their handlers hold the stream that was stderr when torch was imported.
        for name, logger in logging.root.manager.loggerDict.items():
            if name.partition(".")[0] == "torch" and isinstance(logger, logging.Logger):
                stack.enter_context(mock.patch.object(logger, "handlers", []))
        yield


def _place(error: Exception) -> str:
    """The line of the model that caused ``error``, if the error's first line names none."""
    if isinstance(error, CaptureError):
        first, _, rest = str(error).partition("\n")
        lines = re.findall(r"^ {4}(\S+:\d+: .*)", rest, re.MULTILINE)
        return f", at {lines[-1]}" if lines and not re.search(r"\.py:\d+ ", first) else ""
    # Python's message of a syntax error has the file.
    if isinstance(error, (SPCompilerError, SyntaxError)):
        return ""
    packages = {Path(__file__).parents[1], Path(torch.__file__).parent}
    frames = traceback_module.extract_tb(error.__traceback__)
    own = [frame for frame in frames if packages.isdisjoint(Path(frame.filename).parents)]
    # Frames of frozen importlib, between the command and an imported module, have no file.
    own = [frame for frame in own if Path(frame.filename).is_file()]
    return f", at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _hint(name: str, error: Exception, is_cut: bool) -> str:
    """Say where to read more; "" if the error itself says what to do."""
    if isinstance(error, UsageError):
        return f"sp-compiler {name} --help has the arguments and examples"
    if isinstance(error, ArgumentError):
        return ""
    # Commands build models on the meta device, which the user did not ask for.
    if isinstance(error, CaptureError) and "on the meta device" in str(error):
        return "make these inputs with device='cpu'; --traceback shows the rest"
    if isinstance(error, CaptureError) and ADVICE in str(error):
        return f"{str(error).rpartition(ADVICE)[2]}; --traceback shows the rest"
    if isinstance(error, CaptureError) or is_cut:
        return "--traceback shows the rest, with the line of the model"
    if isinstance(error, SPCompilerError):
        return "docs/limitations.md lists what is not supported; --traceback shows where"
    # Other errors came from the model's constructor or forward.
    return "the model's own code raised this; --traceback shows where"


def check_writable(option: str, path: Path | None) -> None:
    """Raise an error for a file that cannot be written, before its content is computed.

    Raises:
        ArgumentError: ``path`` is a folder, its folder does not exist, or it is not writable.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ArgumentError(f"{option} {path}: {reason}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ArgumentError(f"{option} {path}: no permission to write there")


@contextlib.contextmanager
def progress(text: str, *, is_long: bool = True) -> Iterator[None]:
    """Context that announces a step on stderr; output of the step goes there too.

    Args:
        is_long: whether to announce it also if stderr is not a terminal.
    """
    # The process's own stderr, to which the code that a command runs cannot write.
    terminal = Console(file=sys.__stderr__, highlight=False, soft_wrap=True)
    is_spinning = terminal.is_terminal and not os.environ.get("CI")
    # A spinner in a job's log would be a thousand lines; only rank 0 of several reports.
    if is_long and not is_spinning and os.environ.get("RANK", "0") == "0":
        terminal.print(f"{text} ...", markup=False)
    with terminal.status(f"{text} ...") if is_spinning else contextlib.nullcontext(), _to_stderr():
        yield


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    """Keep stdout for the result: models print, and so does the solver of scipy, in C++."""
    flush = ctypes.CDLL(None).fflush
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        flush(None)  # what C has buffered, while it goes to stderr
        os.dup2(stdout, 1)
        os.close(stdout)
