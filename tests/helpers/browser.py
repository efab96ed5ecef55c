"""Pages in a headless browser."""

from __future__ import annotations

import shutil
import subprocess

import pytest

_CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(_CHROMIUM is None, reason="no Chromium")


def dom_of(address: str, *options: str) -> str:
    """Return the page at ``address`` as its scripts leave it; fails if the console has an error."""
    command = [str(_CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    run = subprocess.run(
        [*command, "--enable-logging=stderr", *options, address],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in run.stderr, f"{address}: {run.stderr}"
    return run.stdout
