"""The page of PyTorch's versions has only runs that were seen; setup.py admits none that failed."""

from __future__ import annotations

from pathlib import Path

from docs.generate import torch_versions


def test_page_is_current() -> None:
    assert torch_versions.PAGE.read_text(encoding="utf-8") == torch_versions.page()


def test_nothing_is_admitted_that_failed() -> None:
    runs, admitted = torch_versions.load(), torch_versions.admitted()
    assert {version for version, run in runs.items() if run.failed and version in admitted} == set()
    assert all(run.passed > 1000 for run in runs.values())
    # One of them is what the other tests are pinned to.
    assert "2.13.0" in runs
    assert "3.0.0" not in admitted


def test_what_was_not_seen_is_named() -> None:
    """By minor version: a run of one patch release speaks for the others."""
    unseen = torch_versions.not_seen_green()
    assert all(f"{version}.0" in torch_versions.admitted() for version in unseen)
    assert "2.13" not in unseen
    line = f"Admitted without such a run so far: {', '.join(unseen)}."
    assert (line in torch_versions.page()) == bool(unseen)


def test_a_report_is_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" />'
        "</testsuites>"
    )
    run = torch_versions.read(report)
    assert (run.passed, run.failed, run.skipped) == (4, 3, 3)
