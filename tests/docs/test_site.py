"""The site is built without a broken link, loads nothing from a network, and finds its pages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.docs.code_blocks import ROOT
from tests.helpers.browser import dom_of, needs_browser

_LOADED = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?((?:https?:)?//[^\" >]+)"
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("material") is None,
        reason="no mkdocs-material: pip install -c constraints.txt -e '.[docs]'",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings, such as those about broken links, fail."""
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    return folder


def test_pages_load_nothing_from_a_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        assert not _LOADED.findall(page.read_text(encoding="utf-8")), page


@needs_browser
def test_search_in_a_browser_that_opens_a_file(site: Path) -> None:
    address = f"{(site / 'index.html').as_uri()}?q=load_pretrained"
    page = dom_of(address, "--virtual-time-budget=20000")
    found = re.findall(r'href="([^"?]+)[^"]*" class="md-search-result__link"', page)
    assert (site / "tasks" / "pretrained.html").as_uri() in found


@needs_browser
def test_every_page_opens_as_a_file_without_an_error(site: Path) -> None:
    pages = [page.as_uri() for page in site.rglob("*.html")]
    # Each waits for the browser, not for Python.
    with ThreadPoolExecutor(2) as pool:
        assert all("md-content" in dom for dom in pool.map(dom_of, pages))
