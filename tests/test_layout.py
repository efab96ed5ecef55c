"""The layout: who may import whom, and how the passes are installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PASSES = "sp_compiler.passes"
# What stands above the passes: the public API and what assembles the pipeline.
ABOVE_PASSES = frozenset(
    f"sp_compiler.{name}"
    for name in ("api", "backend", "cli", "pipeline", "planning", "verification", "__main__")
)
MAY_IMPORT_PASSES = frozenset({"sp_compiler.pipeline"})


def _modules(folder: str, package: str) -> dict[str, Path]:
    """Module name to file of every Python file in ``folder``, links not followed."""
    modules = {}
    for directory, _, files in os.walk(ROOT / folder, followlinks=False):
        for path in sorted(Path(directory, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


def _imports(path: Path) -> Iterator[str]:
    """Every module that ``path`` imports: ``from a import b`` as both ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


INFRASTRUCTURE = _modules("sp_compiler", "sp_compiler")
PASS_MODULES = _modules("passes", PASSES)


@pytest.mark.parametrize("name", PASS_MODULES)
def test_passes_import_only_the_infrastructure(name: str) -> None:
    imported = list(_imports(PASS_MODULES[name]))
    assert ABOVE_PASSES.isdisjoint(imported)
    # "from sp_compiler import x" is fine for a submodule x; the bare package is the public API.
    known = INFRASTRUCTURE.keys() | PASS_MODULES.keys() | {"sp_compiler"}
    for module in imported:
        if module.startswith("sp_compiler") and module.count(".") == 1:
            assert module in known, f"{name} imports {module}, which is the public API's name"


@pytest.mark.parametrize("name", sorted(INFRASTRUCTURE.keys() - MAY_IMPORT_PASSES))
def test_only_the_pipeline_imports_passes(name: str) -> None:
    offending = [m for m in _imports(INFRASTRUCTURE[name]) if f"{m}.".startswith(f"{PASSES}.")]
    assert not offending


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
