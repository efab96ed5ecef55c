"""The page of measured times is what the stored results say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import performance


def test_page_is_current() -> None:
    results = map(performance.load, performance.FILES)
    assert performance.PAGE.read_text() == performance.page(*results)


def test_runs_are_kept_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    performance.save(path, "first", [{"ratio": 1.0}], rounds=3)
    performance.save(path, "second", [{"ratio": 2.0}])
    performance.save(path, "first", [{"ratio": 3.0}])
    text = path.read_text()
    assert '"ratio": 1.0' not in text
    assert '"ratio": 2.0' in text
    assert '"ratio": 3.0' in text
    assert performance.machine() in text


def test_what_is_kept_is_on_the_page_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in performance.FILES:
        (tmp_path / f"{name}.json").write_text((performance.RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    monkeypatch.setattr(performance, "PAGE", tmp_path / "performance.md")
    row = {"setting": "none", "contender": "a new one", "median_ms": 1.0, "ratio": 0.5}
    performance.keep("step_time", "overhead", [row], rounds=1)
    assert "| none | a new one | 1.0 | 0.50 |" in performance.PAGE.read_text()
    test_page_is_current()


_WRITES = re.compile(r"\.write_text\(|savefig\(|\bkeep\(|\bsave\(")
# What a program only puts into a temporary folder is no result.
_RESULTS = re.compile("results|PAGE")


def test_benchmarks_write_only_when_told_to() -> None:
    """Each program that writes results has the option, and prints where it is not given."""
    programs = Path(performance.__file__).parent.glob("*.py")
    sources = {path.stem: path.read_text() for path in programs}
    writers = {
        name: text
        for name, text in sources.items()
        if _WRITES.search(text) and _RESULTS.search(text) and "__main__" in text
    }
    assert {"coverage", "step_time", "compile_time", "paper_tables"} <= writers.keys()
    assert [name for name, text in writers.items() if '"--write"' not in text] == []
