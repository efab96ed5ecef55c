"""Texts that tests compare with, a folder per subject, and the helper that checks and renews them.

``REWRITE_GOLDENS=1 python -m pytest tests -m "not slow"`` writes them all anew; read what changed
before committing it. On CI they are only compared, never written.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent


def check_golden(name: str, text: str) -> None:
    """Compare ``text`` with the file ``name`` of this folder, or write that file if asked to."""
    path = FOLDER / name
    text = text.rstrip() + "\n"
    if os.environ.get("REWRITE_GOLDENS") == "1" and not os.environ.get("CI"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    expected = path.read_text(encoding="utf-8") if path.exists() else ""
    assert text == expected, f"{name} differs; REWRITE_GOLDENS=1 writes it anew"
