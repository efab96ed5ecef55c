"""A plan as a page, and its memory over the step."""

from __future__ import annotations

import html
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sp_compiler.api import plan
from sp_compiler.planning.plan import Plan
from tests.helpers.browser import dom_of, needs_browser
from tests.models import zoo


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(zoo.build("gpt2", layers=4), ((), zoo.inputs("gpt2")), tp=2)


def test_timeline(found: Plan) -> None:
    phases = Counter(moment.phase for moment in found.timeline)
    assert phases == {"forward": len(found.calls), "backward": len(found.calls)}
    assert max(moment.num_bytes for moment in found.timeline) == found.activation_peak_bytes
    assert found.to_dict()["timeline"][0]["phase"] == "forward"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attributes if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_in_a_notebook(found: Plan, tmp_path: Path) -> None:
    """The same page, in a frame whose text is escaped."""
    found.to_html(tmp_path / "plan.html")
    shown = found._repr_html_()
    assert shown.startswith('<iframe srcdoc="')
    assert html.unescape(shown.split('"')[1]) == (tmp_path / "plan.html").read_text()


def test_page(found: Plan, tmp_path: Path) -> None:
    target = tmp_path / "plan.html"
    found.to_html(target)
    reader = _Reader()
    reader.feed(target.read_text())
    assert reader.tags["rect"] == len(found.timeline)
    assert reader.tags["script"] == 0
    assert reader.links == []
    for block in found.blocks:
        for tensor in block.kept:
            assert tensor.name in reader.text
    for line in found.notes:
        assert line in reader.text


@pytest.mark.slow
@needs_browser
def test_pages_in_a_browser(found: Plan, tmp_path: Path) -> None:
    """``dom_of`` fails at an error in the console; what is shown is that which was written."""
    grid = plan(
        zoo.build("gpt2", layers=4),
        ((), zoo.inputs("gpt2")),
        mesh="tp=2,pp=2,dp_replicate=1",
        microbatches=4,
    )
    for each, drawn in ((found, len(found.timeline)), (grid, 0)):
        path = tmp_path / "page.html"
        each.to_html(path)
        dom = dom_of(path.as_uri())
        assert dom.count("<rect") >= drawn
        assert f"on {'2 tensor-parallel ranks' if drawn else '4 devices'}" in dom
        assert "</svg>" in dom
