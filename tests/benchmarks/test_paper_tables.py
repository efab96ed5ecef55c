"""Figures from the compiler's graphs of the paper's 22B model, beside the paper's own."""

from __future__ import annotations

import pytest

from benchmarks import paper_tables
from benchmarks.paper_tables import Row

MODEL = "gpt-22b"
pytestmark = pytest.mark.slow


def _difference(row: Row) -> float:
    _, _, paper, ours = row
    return ours / paper - 1


@pytest.mark.parametrize("table", [paper_tables.bytes_of_a_layer, paper_tables.first_stage])
def test_bytes(table: paper_tables.TableRows) -> None:
    """As the paper to a thousandth; beyond it 20 bytes where it keeps 34."""
    rows = list(table(MODEL))
    assert len(rows) >= len(paper_tables.SETTINGS)
    for row in rows:
        expected = 20 / 34 - 1 if row[1] == "sp_compiler" else 0
        assert _difference(row) == pytest.approx(expected, abs=1e-3), row


def test_total_reduction() -> None:
    """At least tenfold against the tensor-parallel baseline; the paper reaches 6.2."""
    *_, (_, setting, _, percent) = paper_tables.percent_of_baseline(MODEL)
    assert setting == "sp_compiler"
    assert 100 / percent >= 10


def test_flops() -> None:
    rows = {row[1]: row for row in paper_tables.flops_and_utilisation(MODEL)}
    assert _difference(rows["model PFLOPs"]) == pytest.approx(0, abs=1e-3)
    assert _difference(rows["MFU, percent"]) == pytest.approx(0, abs=5e-3)
    assert -0.06 < _difference(rows["hardware PFLOPs"]) < 0, "no more than the paper's"


def test_no_matrix_product_is_repeated_but_the_scores() -> None:
    """s/36h of the model's FLOPs, whichever of the two policies."""
    size = paper_tables.PAPER_SETUPS[MODEL]
    h, s = size.model.hidden_size, size.sequence_length
    for recompute in ("attention", "selective"):
        model, hardware = paper_tables.flops(MODEL, recompute)
        share = (s / (36 * h)) / (1 + s / (6 * h))
        assert hardware / model - 1 == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("title", list(paper_tables.TABLES)[:2])
def test_page_is_current(title: str) -> None:
    rows = paper_tables.TABLES[title](MODEL)
    text = paper_tables.PAGE.read_text().partition(f"## {title}")[2].partition("\n## ")[0]
    for row in rows:
        assert f"| {' | '.join(paper_tables.cells(row))} |\n" in text
