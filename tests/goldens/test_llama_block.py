"""A real Llama block after every pass, and the code that runs, compared with texts that were read.

Rewrites of single passes have small graphs of their own beside them; here is how the passes work
together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens import FOLDER, check_golden, llama_block

STAGES = (
    "export",
    "normalize",
    "outline",
    "shard",
    "joint",
    "simplify",
    "tag",
    "partition",
    "overlap",
)
POLICIES = ("none", "selective", "full")


@pytest.mark.parametrize("stage", STAGES)
def test_graph_after(stage: str) -> None:
    text = llama_block.stage_text(llama_block.compiled("selective").stages[stage])
    check_golden(f"llama/{STAGES.index(stage)}_{stage}.txt", text)


def test_every_stage_has_a_golden() -> None:
    assert tuple(llama_block.compiled("selective").stages) == STAGES


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


_PRINT = """
from tests.goldens import llama_block
for stage in llama_block.compiled("selective").stages.values():
    print(llama_block.stage_text(stage).strip(), end="\\n=====\\n")
print(llama_block.code_text("selective").strip(), end="\\n=====\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_texts_do_not_depend_on_the_hash_seed(seed: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PRINT],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [f"{number}_{stage}.txt" for number, stage in enumerate(STAGES)]
    files = [FOLDER / "llama" / name for name in (*names, "code_selective.py.txt")]
    texts = [path.read_text(encoding="utf-8").strip() for path in files]
    assert printed.split("\n=====\n") == [*texts, ""]
