"""Pages say what the code says, link to what exists, and their code runs."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import sp_compiler
from docs.generate.__main__ import PAGES
from docs.generate.sources import PICTURES, source_text
from sp_compiler.options import Options
from tests.docs.code_blocks import ROOT, blocks, own_python
from tests.helpers.rehearsal import run_rehearsed

WRITTEN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_ON_RANKS = """
import copy
import os
from pathlib import Path

import torch
import sp_compiler
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
_config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers={layers},
    num_attention_heads=4, num_key_value_heads=4, use_cache=False,
)
model = LlamaForCausalLM(_config)
original = copy.deepcopy(model)
ids = torch.randint(0, 64, (2, 8))
example_inputs = ((), {"input_ids": ids, "labels": ids})
path = Path.cwd()

def _mixture():
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "use_cache")
    sizes = {name: getattr(_config, name) for name in names}
    return MixtralForCausalLM(
        MixtralConfig(**sizes, num_hidden_layers=1, num_key_value_heads=4, num_local_experts=4)
    )
"""
_SMALLER = {
    "docs/pipeline.md": {
        'AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))': (
            "copy.deepcopy(original)"
        ),
        "50257": "64",
        "(8, 128)": "(8, 16)",
        "range(10)": "range(2)",
        # Four processes instead of eight.
        '(2, 2, 2), mesh_dim_names=("dp_shard", "pp", "tp")': (
            '(2, 2, 1), mesh_dim_names=("dp_shard", "pp", "tp")'
        ),
    },
    # Each of the four processes searches.
    "docs/grids.md": {
        "gpus=8,": "gpus=1,",
        '"cuda", (4, 8, 1)': '"cpu", (2, 2, 1)',
        "mixture.set_experts": "mixture = _mixture()\nmixture.set_experts",
    },
    "docs/overlap.md": {"tp=8": "tp=2"},
}
"""Page to its texts that run smaller than they are printed, with their replacements."""


_OF_TWO_LAYERS = ("docs/graph-diff.md", "docs/grids.md", "docs/pipeline.md")
_ON_TWO = ("README.md", "docs/usage.md", "docs/memory.md", "docs/graph-diff.md", "docs/overlap.md")
_ON_FOUR = ("docs/grids.md", "docs/pipeline.md")
# Scripts of the tasks, files of the how-to pages and what is generated have their own tests.
_ELSEWHERE = ("docs/tasks/", "docs/how-to/", "docs/api.md", "docs/one-block.md")


def test_the_python_of_every_page_is_run() -> None:
    languages = {"python", "py", "python3", "pycon"}
    for path in WRITTEN:
        page = path.relative_to(ROOT).as_posix()
        found = {block.language for block in blocks(path)} & languages
        if found and not page.startswith(_ELSEWHERE):
            assert page in (*_ON_TWO, *_ON_FOUR), page
            assert found == {"python"}, "another name, under which no test runs it"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_generated_page_is_current(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path](), "python -m docs.generate --write"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not broken


def test_files_that_pages_link_to_can_be_shown_by_the_site() -> None:
    linked: set[Path] = set()
    for path in WRITTEN:
        found = re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
        linked |= {(path.parent / link).resolve() for link in found}
    sources = {file for file in linked if file.is_file()}
    sources -= {file for file in sources if file.suffix in (".md", *PICTURES)}
    assert ROOT / "examples" / "plans.ipynb" in sources
    assert all(source_text(file) for file in sources)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "README.md").read_text(encoding="utf-8")
    how_to = (ROOT / "docs" / "how-to" / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in (ROOT / "docs").glob("*.md") if f"(docs/{p.name})" not in index] == []
    pages = [p.name for p in (ROOT / "docs" / "how-to").glob("*.md") if p.name != "README.md"]
    assert [name for name in pages if f"({name})" not in how_to] == []


def test_the_table_of_options_has_them_all() -> None:
    _, table, _ = (ROOT / "docs" / "usage.md").read_text(encoding="utf-8").split("\n## ", 2)
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.+?) \|", table, re.MULTILINE))))
    options = inspect.signature(sp_compiler.compile).parameters.keys() - {"model", "options"}
    assert named == {*options, *Options.__annotations__}


def test_commands_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in WRITTEN:
        shell = "".join(block.text for block in blocks(path) if block.language == "sh")
        for target in re.findall(r"^make ([\w-]+)", shell, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "num_ranks"),
    [
        (_ON_TWO, 2),
        (_ON_FOUR, 4),
    ],
    ids=["two-ranks", "four-ranks"],
)
def test_code_runs_on_ranks(pages: tuple[str, ...], num_ranks: int, tmp_path: Path) -> None:
    run_rehearsed(num_ranks, _run, pages, tmp_path, rehearsal=_compile)


def _compile(pages: tuple[str, ...], folder: Path) -> None:
    """Run each statement, on a rank that receives nothing from others, so that some fail."""
    own = folder / "compile"  # where nothing is in the way of what the pages write
    own.mkdir()
    with _as_ranks(own):
        for page in pages:
            names: dict[str, Any] = {}
            for statement in ast.parse("\n".join(_parts(page))).body:
                with contextlib.suppress(Exception):
                    exec(compile(ast.Module([statement], []), page, "exec"), names)


def _run(pages: tuple[str, ...], folder: Path) -> None:
    with _as_ranks(folder):
        for page in pages:
            program = folder / f"{dist.get_rank()}-{page.replace('/', '-')}.py"
            program.write_text("\n".join(_parts(page)), encoding="utf-8")
            runpy.run_path(str(program), run_name="__main__")


@contextlib.contextmanager
def _as_ranks(folder: Path) -> Iterator[None]:
    warnings.simplefilter("ignore")
    os.chdir(folder)
    with contextlib.ExitStack() as patches:
        # The runner has made the process group.
        patches.enter_context(mock.patch.object(dist, "init_process_group"))
        if dist.get_rank() or dist.get_backend() == "fake":
            # What needs no other process: the first rank shows that it runs, once.
            alone = dict.fromkeys(("plan", "verify", "suggest"), mock.DEFAULT)
            patches.enter_context(mock.patch.multiple(sp_compiler, **alone))
        yield


def _parts(page: str) -> Iterator[str]:
    """A program in parts: what pages take for granted, then their blocks."""
    yield _ON_RANKS.replace("{layers}", "2" if page in _OF_TWO_LAYERS else "1")
    # Blocks are alternatives here: each takes over a model, which only one pipeline can have.
    again = "model = copy.deepcopy(original)\n"
    again += "optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4)\n"
    smaller = _SMALLER.get(page, {})
    unseen = {*smaller}
    for number, text in enumerate(own_python(ROOT / page)):
        for printed, run in smaller.items():
            if printed in text:
                unseen.discard(printed)
                text = text.replace(printed, run)
        yield again + text if number and page == "docs/pipeline.md" else text
    assert not unseen
