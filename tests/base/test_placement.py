"""Placements in a text are explained below it."""

from __future__ import annotations

import pytest

from sp_compiler.base.placement import legend_of


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("S(0), R -> P", ["S(i)", "P", "R"]),
        ("%x = convert(%y, 'I', 'S(1|128,64)', 2) : f32[2] @ S(1|128,64)", ["S(i)", "I"]),
        ("all-gather of relu (T(2) to R), 8.7 us", ["R", "T(n)"]),
        ("placement none -> I", ["I"]),
        ("weight (128, 96) f32 S(1|96/3), P", ["S(i)", "S(i|a/n)", "P"]),
        ("Shard(0) and Replicate()", []),
        ("%R = layers.P.up(%S, I(2)) in model.R", []),
        ("", []),
    ],
)
def test_only_what_is_printed_is_explained(line: str, kinds: list[str]) -> None:
    lines = legend_of([line])
    assert [text.split()[0] for text in lines[2:]] == kinds
    assert lines[:2] == (["", "Placements"] if kinds else [])


def test_each_kind_is_explained_once() -> None:
    assert legend_of(["R -> P", "P -> R"]) == legend_of(["P, R"])
