"""Generated modules: their lines are there as long as they are, and no longer."""

from __future__ import annotations

import gc
import linecache
import traceback

import pytest

from sp_compiler.codegen.loading import load

_SOURCE = "class Block:\n    @staticmethod\n    def forward(x):\n        return 1 / x\n"


def _files() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<sp_compiler ")}


def _traceback_of(namespace: dict[str, object]) -> str:
    block = namespace["Block"]
    with pytest.raises(ZeroDivisionError) as caught:
        block.forward(0)  # type: ignore[attr-defined]
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.slow
def test_lines_live_as_long_as_a_function_of_the_module() -> None:
    gc.collect()  # of modules that other tests loaded
    before = _files()
    forward = load(_SOURCE)["Block"].forward
    gc.collect()
    (name,) = _files() - before
    assert linecache.getline(name, 4) == "        return 1 / x\n"
    assert forward(1) == 1
    del forward
    gc.collect()
    assert _files() <= before  # modules of other tests may go meanwhile


def test_equal_texts_do_not_share_their_lines() -> None:
    first, second = load(_SOURCE), load(_SOURCE)
    del first
    gc.collect()
    assert "return 1 / x" in _traceback_of(second)
