"""The layout: the order of the layers, who may import whom, and how the passes are installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

import sp_compiler

ROOT = Path(__file__).parent.parent
PASSES = "sp_compiler.passes"
# In the order in which a model flows through them: each imports only those before it.
LAYERS = (
    "base",
    "ops",
    "ir",
    "trace",
    "rules",
    "solve",
    "cost",
    "options",
    "check",
    "inductor",
    "codegen",
    "emulation",
    "runtime",
    "planning",
    "passes",
    "pass_manager",
    "compiler",
    "graph_diff",
    "verification",
    "grid",
    "module",
    "pipeline_parallel",
    "grid_plan",
    "torch_compile",
    "api",
    "command_line",
    "__main__",
)
MAX_MODULES = 14  # of one folder
MAX_LINES = 400  # of one module, tests included
# Without docstrings: what is long there is the list of options, each of which needs its words.
MAX_LINES_OF = {ast.ClassDef: 250, ast.FunctionDef: 60}
FOLDERS = ("sp_compiler", "passes", "tests", "benchmarks", "docs", "examples")


def _modules(folder: str, package: str) -> dict[str, Path]:
    """Module name to file of every Python file in ``folder``, links not followed."""
    modules = {}
    for directory, _, files in os.walk(ROOT / folder, followlinks=False):
        for path in sorted(Path(directory, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


MODULES = {**_modules("sp_compiler", "sp_compiler"), **_modules("passes", PASSES)}


def _imports(path: Path) -> Iterator[str]:
    """Modules of ours that ``path`` imports; ``from a import b`` is ``a.b`` if that is a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found = full if full in MODULES else node.module
                if found in MODULES:
                    yield found


IMPORTS = {name: set(_imports(path)) for name, path in MODULES.items()}


def _layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


@pytest.mark.parametrize("name", sorted(MODULES.keys() - {"sp_compiler"}))
def test_a_folder_imports_only_what_stands_before_it(name: str) -> None:
    assert "sp_compiler" not in IMPORTS[name], "the public face is for users"
    upward = [module for module in IMPORTS[name] if _layer(module) > _layer(name)]
    assert not upward, f"{name} imports {upward}, which stand behind it in LAYERS"


def test_no_circle_of_imports() -> None:
    graph = nx.DiGraph((name, module) for name in MODULES for module in IMPORTS[name])
    assert not list(nx.simple_cycles(graph))


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_scripts_import_modules_that_exist(folder: str) -> None:
    # No fast test imports them all: a module that moved would be missed by whoever runs one next.
    for path in _modules(folder, folder).values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sp_compiler"):
                assert node.module in MODULES, f"{path}:{node.lineno}: no module {node.module}"


def test_every_folder_has_a_place_in_the_order() -> None:
    top = {name.split(".")[1] for name in MODULES if "." in name}
    assert top == set(LAYERS)


def test_folders_stay_small() -> None:
    folders = [path.parent for path in MODULES.values() if path.name != "__init__.py"]
    crowded = {str(f.relative_to(ROOT)): folders.count(f) for f in folders}
    assert max(crowded.values()) <= MAX_MODULES, crowded


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_classes_and_functions_stay_short(folder: str) -> None:
    for path in _modules(folder, folder).values():
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= MAX_LINES, path
        for node in ast.walk(ast.parse(text)):
            if type(node) in MAX_LINES_OF:
                lines = _lines(node) - sum(_docstring_lines(each) for each in ast.walk(node))
                assert lines <= MAX_LINES_OF[type(node)], f"{path}:{node.lineno}: {lines} lines"


def _docstring_lines(node: ast.AST) -> int:
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
        return _lines(node.body[0])
    return 0


def _lines(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def test_the_public_face_shows_what_a_user_may_use() -> None:
    assert set(dir(sp_compiler)) == {*sp_compiler.__all__, "__version__"}
    assert not {"base", "passes", "compiler"} & set(dir(sp_compiler))


def test_passes_raise_under_any_other_name() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import passes"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "import it as 'sp_compiler.passes'" in result.stderr


def test_link_points_to_the_passes() -> None:
    link = ROOT / "sp_compiler" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


@pytest.mark.slow
def test_wheel_holds_every_module_once_and_imports_from_an_empty_directory(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    build = [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"sp_compiler"}
    assert "sp_compiler/passes/__init__.py" in names

    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    code = "import sp_compiler, sp_compiler.passes; print(sp_compiler.__file__)"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip().startswith(str(site))
