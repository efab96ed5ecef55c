"""The versions of PyTorch that pass the fast tests.

python -m docs.generate.torch_versions REPORT [--write]

``make compat TORCH=...`` runs the tests in an environment of that version and calls this with
pytest's report. Its figures are kept in ``benchmarks/results/torch_versions.json``, for no other
command could make them again in one environment.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "torch_versions.md"
RESULTS = ROOT / "benchmarks" / "results" / "torch_versions.json"


@dataclass(frozen=True)
class Run:
    """One run of the fast tests; ``day`` in ISO format."""

    day: str
    passed: int
    failed: int
    skipped: int


def load() -> dict[str, Run]:
    """Version to its last run, oldest version first."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {version: Run(**runs[version]) for version in sorted(runs, key=Version)}


def admitted() -> SpecifierSet:
    """The versions that ``setup.py`` admits."""
    requirement = re.search(r'"torch([^"_a-z]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert requirement is not None
    return SpecifierSet(requirement[1])


def not_seen_green() -> list[str]:
    """Minor versions that ``setup.py`` admits and that have no stored run without a failure."""
    green = {Version(version).minor for version, run in load().items() if not run.failed}
    allowed = admitted()
    minors = [minor for minor in range(100) if f"2.{minor}.0" in allowed]
    return [f"2.{minor}" for minor in minors if minor not in green]


def page() -> str:
    """The page, from the runs that are kept."""
    unseen = ", ".join(not_seen_green())
    rows = [
        f"| {version} | {run.passed} | {run.failed} | {run.skipped} | {run.day} |"
        for version, run in load().items()
    ]
    return "\n".join(
        [
            "# Versions of PyTorch",
            "",
            "Which versions of PyTorch pass the fast tests, each in a separate environment made by",
            "`make compat TORCH=2.11.0 WRITE=--write`. `setup.py` excludes versions that failed.",
            *([f"Admitted without such a run so far: {unseen}."] if unseen else []),
            "",
            "| torch | passed | failed | skipped | day |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def read(report: Path) -> Run:
    """Totals of a report that pytest wrote by ``--junitxml``."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.attrib[key]) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Run(day, total - failed - skipped, failed, skipped)


def main() -> None:
    """Print this version's run; with ``--write``, keep it and renew the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("report", type=Path, help="what pytest --junitxml wrote")
    parser.add_argument("--write", action="store_true", help="keep it and renew the page")
    arguments = parser.parse_args()
    version, run = torch.__version__.partition("+")[0], read(arguments.report)
    print(f"torch {version}: {run.passed} passed, {run.failed} failed, {run.skipped} skipped")
    if arguments.write:
        runs = {name: asdict(one) for name, one in {**load(), version: run}.items()}
        RESULTS.write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        PAGE.write_text(page(), encoding="utf-8")
    raise SystemExit(bool(run.failed))


if __name__ == "__main__":
    main()
