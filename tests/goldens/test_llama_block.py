"""A real Llama block after every pass, and the code that runs, compared with texts that were read.

Rewrites of single passes have small graphs of their own beside them; here is how the passes work
together. Python hashes strings differently in every process, so texts that depended on the order of
a set would not be equal each time.
"""

from __future__ import annotations

import re

import pytest

from tests.goldens import FOLDER, check_golden, llama_block

POLICIES = ("none", "selective", "full")


def test_order_of_the_passes() -> None:
    program = llama_block.compiled("selective")
    names = [report.name for report in program.reports]
    lines = [name if name in program.stages else f"{name} (no graphs)" for name in names]
    check_golden("pass_order.txt", "\n".join(lines))


# By what there is, not by a list: a new pass is no change of this file.
def test_graph_after_each_pass() -> None:
    stages = llama_block.compiled("selective").stages
    for name, stage in stages.items():
        check_golden(f"llama/{name}.txt", llama_block.stage_text(stage))
    graphs = {path.stem for path in (FOLDER / "llama").glob("*.txt") if ".py" not in path.name}
    assert graphs == set(stages)


@pytest.mark.parametrize("policy", POLICIES)
def test_code_with(policy: str) -> None:
    check_golden(f"llama/code_{policy}.py.txt", llama_block.code_text(policy))


def test_fused_attention_has_no_core_to_recompute() -> None:
    assert llama_block.code_text("attention") == llama_block.code_text("none")


_ELSEWHERE = re.compile(r"/\w+/|site-packages|transformers|\.py\b|line \d|at 0x", re.IGNORECASE)


def test_goldens_name_nothing_of_this_machine_nor_lines_of_libraries() -> None:
    for path in sorted(FOLDER.glob("*/*.txt")):
        found = _ELSEWHERE.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.name}: {found}"
