"""The only place that prints arbitrary text into Python source.

Names of modules, parameters and classes, and string arguments of operators are data. Whatever they
contain, a docstring stays a single docstring, a comment ends with its line, and a literal evaluates
to its original value. Every function here returns text that is safe by construction, and generated
code is assembled only from such text.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable, Iterable, Sequence

Wrapped = Callable[[str, Sequence[str], str], list[str]]
"""``(head, items, tail)``: lines of ``head items tail``, wrapped if that is too long for one."""

_QUOTED = '\\"'
# Soft keywords (match, type) and builtins are legal names, but would confuse a reader, and
# generated code may call the builtin.
_RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins)})


def identifier(name: str, taken: Iterable[str] = ()) -> str:
    """Return a Python identifier like ``name`` that is not a keyword, a builtin or in ``taken``.

    ASCII only: Python normalizes other letters, which could make two names equal.
    """
    text = re.sub(r"[^0-9A-Za-z_]+", "_", name)
    if not text.strip("_"):  # nothing readable is left, for example of a name in another script
        text = "value"
    if text[0].isdigit():
        text = f"_{text}"
    return f"{text}_" if text in _RESERVED or text in taken else text


def comment(text: str) -> str:
    """Return ``# text``, which ends with its line."""
    return f"# {_printable(text)}"


def docstring(lines: Iterable[str]) -> list[str]:
    """Return the lines of a docstring, including quotes."""
    # Every quote is escaped: three would end the docstring, and one at its end would make four.
    first, *rest = (_printable(line, _QUOTED) for line in lines)
    return [f'"""{first}', *rest, '"""'] if rest else [f'"""{first}"""']


def string(text: str) -> str:
    """Return ``text`` as a string literal with double quotes."""
    return f'"{_printable(text, _QUOTED)}"'


def _printable(text: str, escaped: str = "") -> str:
    """Escape line ends and unprintable characters of ``text``, and those in ``escaped``."""
    # Unprintable includes characters that change the reading direction, which could hide code.
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
