"""Sources of the repository as pages of the site, which is built from Markdown."""

from __future__ import annotations

import json
from pathlib import Path

PICTURES = (".png", ".svg")
_LANGUAGES = {".py": "python", ".sh": "sh", ".toml": "toml"}
SHOWN = (*_LANGUAGES, ".ipynb")
"""Kinds of files that have a page."""


def source_text(file: Path) -> str:
    """Return ``file`` as Markdown; of a notebook the cells, without what they printed.

    Raises:
        KeyError: a kind of file that is not in ``SHOWN``.
    """
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        return f"```{_LANGUAGES[file.suffix]}\n{text}```"
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
    return "\n\n".join(
        f"```python\n{cell}\n```" if kind == "code" else cell for cell, kind in cells
    )
