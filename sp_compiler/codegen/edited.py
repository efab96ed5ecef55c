"""Generated code that a user has edited."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.python_text import identifier
from sp_compiler.codegen.loading import load, origin_of
from sp_compiler.ir.compiled_program import CompiledProgram

_METHODS = (
    *("forward", "backward", "loss_backward"),
    *("recompute", "backward_rest", "backward_ahead"),
    *("backward_inputs", "backward_weights", "backward_behind"),
)


def with_code(compiled: CompiledProgram, source: str) -> CompiledProgram:
    """Return ``compiled`` with the code ``source``, which must have the same classes and methods.

    The saved tensors may differ: only forward and backward have to agree on them.

    Raises:
        ArgumentError: the text is not valid Python or fails to load; a class, a method or a
            parameter is missing or new.
    """
    try:
        namespace = load(source)
    except SyntaxError as error:
        raise ArgumentError(
            f"edited code, line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from error
    except Exception as error:  # whatever its statements raise
        raise ArgumentError(
            f"the edited code cannot be loaded: {type(error).__name__}: {error}\n{origin_of(error)}"
        ) from error
    codes: dict[str, Any] = {}
    for name, generated in compiled.codes.items():
        title = identifier(name)
        edited: Any = namespace.get(title)
        if not inspect.isclass(edited):
            raise ArgumentError(f"edited code: there is no class {title}; keep all classes")
        for method in _METHODS:
            wanted, given = _parameters(generated, method), _parameters(edited, method)
            # Only their number counts: they are passed by position, so they may be renamed.
            if wanted is not None and (given is None or len(given) != len(wanted)):
                was = "is missing" if given is None else f"takes ({', '.join(given)})"
                raise ArgumentError(
                    f"edited code: {title}.{method} {was}; expected a static method that takes "
                    f"({', '.join(wanted)})"
                )
        codes[name] = edited
    losses = {
        name: replace(loss, run=codes[name].loss_backward)
        for name, loss in compiled.loss_backwards.items()
    }
    return replace(compiled, codes=codes, loss_backwards=losses, code=source)


def _parameters(code: object, method: str) -> list[str] | None:
    """Names of the parameters of a static method; ``None`` if there is no such method."""
    function = inspect.getattr_static(code, method, None)
    return (
        list(inspect.signature(function.__func__).parameters)
        if isinstance(function, staticmethod)
        else None
    )
