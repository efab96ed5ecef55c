"""Loading of generated code as a module, whose lines tracebacks show."""

from __future__ import annotations

import hashlib
import itertools
import linecache
import traceback
import weakref
from typing import Any

_numbers = itertools.count()
_FILE = "<sp_compiler "


class Namespace(dict[str, Any]):
    """The names of a generated module.

    Its functions keep it alive, and it keeps its lines in :mod:`linecache` while it lives.
    """

    __slots__ = ("__weakref__",)


def load(source: str) -> Namespace:
    """Execute generated text and return its names; tracebacks show its lines."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    # Equal texts have separate entries, because one may live longer than another.
    filename = f"{_FILE}{digest} {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = Namespace(__name__=f"sp_compiler.generated_{digest}")
    # Not at exit: linecache may be gone by then.
    weakref.finalize(namespace, linecache.cache.pop, filename, None).atexit = False
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def line_of(error: BaseException) -> str:
    """Return ``", line 12: y = torch.mm(x)"``, the innermost line of generated text that ``error``
    came through; "" if it came through none."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename.startswith(_FILE)]
    return f", line {lines[-1].lineno}: {lines[-1].line}" if lines else ""
