"""``docs/tasks``: each page shows its script, as ``examples/tasks`` has it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "tasks"
# The text around it is written by hand: only the block behind the comment is replaced.
_SHOWN = re.compile(r"(<!-- (examples/tasks/\w+\.py) -->\n\n```python\n).*?(^```$)", re.M | re.S)


def script_of(page: Path) -> Path | None:
    """The script that a page shows; ``None`` where it shows none."""
    shown = _SHOWN.search(page.read_text(encoding="utf-8"))
    return ROOT / shown[2] if shown else None


def _page(path: Path) -> str:
    def current(block: re.Match[str]) -> str:
        return block[1] + (ROOT / block[2]).read_text(encoding="utf-8") + block[3]

    return _SHOWN.sub(current, path.read_text(encoding="utf-8"))


PAGES: dict[Path, Callable[[], str]] = {
    path: partial(_page, path) for path in sorted(FOLDER.glob("*.md")) if script_of(path)
}
