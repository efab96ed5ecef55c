"""Regions after tagging, of which several may come from one sharded region."""

from __future__ import annotations

from typing import Any

from sp_compiler.passes.memory.tag_program import TaggedProgram


def test_what_is_known_of_an_operator_holds_in_all_regions_made_of_its_own() -> None:
    program: Any = None
    tagged = TaggedProgram(program, {}, {"Block": "Block", "Block2": "Block", "Head": "Head"})
    found = {("Block", "matmul"): 4, ("Head", "linear"): 5}
    assert tagged.by_operator(found) == {
        ("Block", "matmul"): 4,
        ("Block2", "matmul"): 4,
        ("Head", "linear"): 5,
    }
