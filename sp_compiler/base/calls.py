"""Calls of public functions with arguments that they do not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from sp_compiler.base.errors import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])


def refusing_other_arguments(function: Function, signature: inspect.Signature) -> Function:
    """Return ``function`` with the ``signature``, whose ``TypeError`` says what is near and
    needed."""
    parameters = signature.parameters.values()
    needed = [each for each in parameters if each.default is each.empty]
    form = ", ".join(
        f"{each.name}=..." if each.kind is each.KEYWORD_ONLY else each.name for each in needed
    )

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((key for key in kwargs if key not in signature.parameters), None)
            near = "" if unknown is None else did_you_mean(unknown, signature.parameters)
            raise TypeError(
                f"{function.__name__}(): {error}; expected {function.__name__}({form}) and options "
                f"by name{near}"
            ) from None
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return cast(Function, checked)
