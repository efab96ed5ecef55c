"""The page of measured times is what the stored results say."""

from __future__ import annotations

from pathlib import Path

from benchmarks import performance


def test_page_is_current() -> None:
    results = performance.load("step_time"), performance.load("compile_time")
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
