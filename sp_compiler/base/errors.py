"""The exceptions of sp_compiler, all derived from :class:`SPCompilerError`.

Every message says what was wrong, what is allowed, where in the user's model, and what to do.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar, cast

from torch.fx import Node

from sp_compiler.base.provenance import node_origin

Function = TypeVar("Function", bound=Callable[..., Any])


class SPCompilerError(Exception):
    """Base class of every error that sp_compiler raises on purpose."""


class ArgumentError(SPCompilerError, ValueError):
    """An invalid argument of the public API; the message says what is allowed."""


class UnsupportedError(SPCompilerError, NotImplementedError):
    """A feature that this version does not support; the message says what it supports."""


class NotCompiledError(SPCompilerError, RuntimeError):
    """Something that a compilation creates was accessed before it."""


class CaptureError(SPCompilerError, RuntimeError):
    """The model could not be captured as one graph."""


class PassError(SPCompilerError, RuntimeError):
    """A pass got a graph that it cannot handle.

    Args:
        pass_name: the pass that failed.
        message: what is wrong, and what is allowed.
        node: the offending node; its module path and source line are appended to the message.
    """

    def __init__(self, pass_name: str, message: str, node: Node | None = None) -> None:
        where = f"\n  node: {node.format_node()}\n{node_origin(node)}" if node is not None else ""
        super().__init__(f"[{pass_name}] {message}{where}")
        self.pass_name = pass_name
        self.node = node


class PlacementError(PassError):
    """A placement that the typing rules reject: the graph would compute wrong results.

    ``region`` is the name of the node's region, if it is known.
    """

    region: str = ""


class RankMismatchError(SPCompilerError, RuntimeError):
    """The ranks of one tensor-parallel group disagree on what to run."""


class RankFailureError(SPCompilerError, RuntimeError):
    """Another rank of the tensor-parallel group failed; the message is that rank's."""


def did_you_mean(got: object, known: Iterable[object]) -> str:
    """Return ``"did you mean 'recompute'? "`` for the nearest of the ``known`` names, or ""."""
    names = [each for each in known if isinstance(each, str)]
    near = difflib.get_close_matches(got, names, n=1) if isinstance(got, str) else []
    return f"did you mean {near[0]!r}? " if near else ""


def expected_one_of(
    got: object, known: Iterable[object], show: Callable[[object], str] = str
) -> str:
    """Return "expected one of ..." with all ``known`` names, after a guess of the intended one.

    The guess comes first, since it would be overlooked after a list of twenty names.
    """
    values = list(known)
    return f"{did_you_mean(got, values)}expected one of {', '.join(map(show, values))}"


def refusing_other_arguments(
    function: Function, signature: inspect.Signature, explained: Collection[str]
) -> Function:
    """Return ``function`` with the ``signature``, whose ``TypeError`` suggests similar names and
    lists required ones.

    The names ``explained`` are refused by the function itself, which can say why.
    """
    parameters = signature.parameters.values()
    needed = [each for each in parameters if each.default is each.empty]
    form = ", ".join(
        f"{each.name}=..." if each.kind is each.KEYWORD_ONLY else each.name for each in needed
    )

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **{key: kwargs[key] for key in kwargs if key not in explained})
        except TypeError as error:
            unknown = next((key for key in kwargs if key not in signature.parameters), None)
            near = did_you_mean(unknown, signature.parameters)
            raise TypeError(
                f"{function.__name__}(): {error}; {near}expected {function.__name__}({form}) and "
                "options by name"
            ) from None
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return cast(Function, checked)
