"""Warnings that point to the user's own line, and that line for other messages."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import warnings
from types import FrameType

import torch

# Folders whose frames are never user code: PyTorch's and this package's. They are real paths, since
# environments are often reached through symbolic links: compare results of os.path.realpath.
_LIBRARY_FOLDERS = tuple(
    os.path.dirname(os.path.realpath(str(module.__file__))) + os.sep
    for module in (torch, sys.modules[__name__.partition(".")[0]])
)
# And contextlib's, whose frames are between ours where a decorator is a context manager.
_SKIPPED = (*_LIBRARY_FOLDERS, os.path.realpath(str(contextlib.__file__)))

# Cached: a capture asks for the same few files thousands of times, and realpath reads the disk.
_real_path = functools.lru_cache(maxsize=1024)(os.path.realpath)


def warn(message: str) -> None:
    """Issue a ``UserWarning`` at the innermost line that is not in PyTorch or sp_compiler."""
    # Counted by hand: ``skip_file_prefixes`` of ``warnings.warn`` needs Python 3.12.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def in_library(filename: str) -> bool:
    """Return whether this is a file of PyTorch or of this package."""
    return _real_path(filename).startswith(_LIBRARY_FOLDERS)


def is_library(filename: str) -> bool:
    """Return whether this file is not user code: of PyTorch, of this package, or generated."""
    # "<eval_with_key>", "<string>": generated code, which is ours or PyTorch's.
    return filename.startswith("<") or _real_path(filename).startswith(_SKIPPED)


def user_line() -> str:
    """Return the innermost running line outside of PyTorch and sp_compiler, as "file.py:12
    code"."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    return line_text(frame.f_code.co_filename, frame.f_lineno)


def line_text(filename: str, number: int) -> str:
    """Return a line as "file.py:12 code"."""
    return f"{os.path.basename(filename)}:{number} {linecache.getline(filename, number).strip()}"
