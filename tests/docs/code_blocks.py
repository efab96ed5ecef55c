"""The code blocks of a page, to be run as they are printed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)(?: (\w+)=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        language: ``"python"``, ``"sh"``...
        action: what the word behind the language says to do with the text, "" for running it:
            ``"new"`` writes a file of the repository, ``"append"`` adds to the end of one.
        path: of that file.
        text: the code.
    """

    language: str
    action: str
    path: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page in order."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(*parts) for parts in found]


def own_python(page: Path) -> list[str]:
    """The page's own Python, without files that it writes."""
    return [b.text for b in blocks(page) if b.language == "python" and not b.action]


def script(page: Path, preamble: str) -> str:
    """The page's own Python, one block after another."""
    return "\n".join([preamble, *own_python(page)])
