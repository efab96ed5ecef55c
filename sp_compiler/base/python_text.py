"""Text of ours and of others as parts of Python source: the one place that prints it.

Names of modules, parameters and classes, and string arguments of operators are data: whatever they
contain, a docstring stays one docstring, a comment ends with its line and a literal evaluates to
the value that it was made of. Every function here returns text that is safe by construction; the
generated code is put together from nothing else.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

_QUOTED = '\\"'
# Soft keywords (match, type) and builtins are legal names, but a reader takes them for something
# else, and generated code may call the builtin.
_RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins)})


def identifier(name: str, taken: Iterable[str] = ()) -> str:
    """A Python identifier close to ``name``: neither keyword nor builtin, and none of ``taken``.

    ASCII only: Python reads other letters in a normal form, in which two names may be one.
    """
    text = re.sub(r"[^0-9A-Za-z_]+", "_", name)
    if not text.strip("_"):
        text = "value"
    if text[0].isdigit():
        text = f"_{text}"
    return f"{text}_" if text in _RESERVED or text in taken else text


def comment(text: str) -> str:
    """``# text`` that ends with its line."""
    return f"# {_printable(text)}"


def docstring(lines: Iterable[str]) -> list[str]:
    """The lines of a docstring, quotes included."""
    first, *rest = (_printable(line, _QUOTED) for line in lines)
    return [f'"""{first}', *rest, '"""'] if rest else [f'"""{first}"""']


def string(text: str) -> str:
    """A string literal with double quotes."""
    return f'"{_printable(text, _QUOTED)}"'


def _printable(text: str, escaped: str = "") -> str:
    """``text`` with all that ends a line or is no text, and ``escaped``, behind backslashes."""
    return "".join(
        f"\\{char}" if char in escaped else char if char.isprintable() else _escape(char)
        for char in str(text)
    )


def _escape(char: str) -> str:
    number = ord(char)
    if char in "\n\r\t":
        return repr(char)[1:-1]
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
