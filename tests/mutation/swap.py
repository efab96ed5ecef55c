"""Mutated functions in place of loaded ones: nothing has to be imported again."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

_Key = tuple[str, int]


def swap(path: str, source: str, mutated: str) -> bool:
    """Give the functions of a loaded module the code of ``mutated``; all that hold them have it.

    Args:
        path: of the module, as its functions name it.
        source: what was loaded.
        mutated: as many lines.

    Returns:
        Whether that is the whole difference, and was made: what a module or a class computes while
        it is loaded cannot be changed afterwards.
    """
    before, after = _codes(path, source), _codes(path, mutated)
    if before.keys() != after.keys():
        return False
    changed = {key for key, code in before.items() if _own(code) != _own(after[key])}
    if any(not before[key].co_flags & inspect.CO_OPTIMIZED for key in changed):
        return False
    gc.unfreeze()  # what tests have frozen is not among the objects
    loaded = [
        each
        for each in gc.get_objects()
        # Not isinstance, which asks some objects of torch for their class, and they warn.
        if type(each) is FunctionType and each.__code__.co_filename == path
    ]
    for function in loaded:
        code = after.get(_key(function.__code__))
        if code is not None:
            function.__code__ = code
    return bool(loaded)


def _codes(path: str, source: str) -> dict[_Key, CodeType]:
    return {_key(code): code for code in _nested(compile(source, path, "exec", dont_inherit=True))}


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _key(code: CodeType) -> _Key:
    return code.co_qualname, code.co_firstlineno


def _own(code: CodeType) -> tuple[object, ...]:
    """All of ``code`` but the functions inside it."""
    constants = [repr(value) for value in code.co_consts if not isinstance(value, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants
