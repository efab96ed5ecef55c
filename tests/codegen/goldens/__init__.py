"""Texts that tests compare with, one file each.

``REWRITE_GOLDENS=1 python -m pytest tests`` rewrites them all; read the difference afterwards.
"""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).parent


def check_golden(name: str, text: str) -> None:
    """Compare ``text`` with the file ``name``, or rewrite the file if asked to."""
    path = _FOLDER / name
    if os.environ.get("REWRITE_GOLDENS") == "1" and not os.environ.get("CI"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs; REWRITE_GOLDENS=1 rewrites"
