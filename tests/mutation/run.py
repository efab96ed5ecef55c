"""Share of a fixed draw of mutations that the fast tests kill.

    python -m tests.mutation.run --count 60 [--seed 0] [--limit 90] [--only passes/normalize ...]

Each mutation is applied to a copy of the tree. There run the fast tests that mirror the module,
then those that import it; where none mirrors it those of its folder too, and where there are none
at all a few that compile small models through everything. A mutation is *killed* by the first
failure of a test that passes without it, *survives* if all pass, and *times out* if the limit ends
first, which is not counted as killed.

A process that has loaded everything is copied for each mutation, and functions that differ get new
code in the copy. The file is written as well, for what starts from the disk, such as spawned ranks.

Every outcome is kept in ``score.json``; ``README.md`` says how to go on with those.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import pkgutil
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutation import score
from tests.mutation.mutants import ROOT, Mutant, drawn, modules
from tests.mutation.swap import swap

# Small models through everything, for a folder without tests.
_CORE = ("tests/end_to_end/test_near_misses.py", "tests/verification/test_proof.py")
# Loaded once, before the copies of this process that run tests.
_PRELOADED = (
    *("torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.testing._internal.distributed.fake_pg"),
    *("transformers", "networkx", "scipy.optimize", "spmd_types", "sympy", "rich", "hypothesis"),
)


def tests_of(path: str, tree: Path, *, wide: bool) -> list[str]:
    """Test files for a module: those named after it and those that import it, else a few.

    ``wide``: behind them all others, those of its folder and of whole models first.
    """
    module = Path(path).with_suffix("")
    name = module.parent if module.name == "__init__" else module
    folder = Path("tests", *[part for part in name.parts[:-1] if part != "sp_compiler"])
    dotted = ".".join(name.parts)
    dotted = dotted if dotted.startswith("sp_compiler") else f"sp_compiler.{dotted}"
    files = sorted((tree / "tests").rglob("test_*.py"))
    # One file may test the modules of a folder, as tests/trace/test_masked_rows.py does.
    stems = {f"test_{part}" for part in name.parts[1:]}
    above = {tree / folder, *(tree / folder).parents}
    named = [file for file in files if file.parent in above and file.stem in stems]
    importers = [file for file in files if dotted in file.read_text(encoding="utf-8")]
    if not named:  # a part of its folder, which is tested as one
        importers += [file for file in files if file.parent == tree / folder]
    rest = [file.relative_to(tree).as_posix() for file in files]
    chosen = [file.relative_to(tree).as_posix() for file in (*named, *importers)] or list(_CORE)
    if wide:
        near = (f"{folder.as_posix()}/", "tests/end_to_end/", "tests/usage/")
        rest.sort(key=lambda file: [not file.startswith(each) for each in near])
        chosen += rest
    return list(dict.fromkeys(chosen))


class Runner:
    """Runs the fast tests on single mutations in a copy of the repository.

    Attributes:
        tree: the copy.
        limit_s: CPU seconds for the tests of one mutation.
        wide: all fast tests run, not those of the module alone.
        sound: tests that are known to pass without any mutation.
        broken: tests that fail without one: they can kill nothing and are left out.
    """

    def __init__(self, tree: Path, limit_s: int, *, wide: bool = False) -> None:
        self.tree = tree
        self.limit_s = limit_s
        self.wide = wide
        self.sound: set[str] = set()
        self.broken: set[str] = set()
        ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        self._load()

    def _load(self) -> None:
        """Import the copy, for all that will be forked from this process."""
        os.chdir(self.tree)
        rest = [path for path in sys.path if Path(path or ".").resolve() != ROOT]
        sys.path = [str(self.tree), *rest]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]  # of the original
        package = importlib.import_module("sp_compiler")
        names = [each.name for each in pkgutil.walk_packages(package.__path__, "sp_compiler.")]
        for folder in ("tests/helpers", "tests/models"):
            files = (self.tree / folder).glob("*.py")
            names += [f"{folder.replace('/', '.')}.{file.stem}" for file in files]
        for name in (*_PRELOADED, *sorted(names)):
            if not name.endswith("__main__"):
                importlib.import_module(name)

    def outcome(self, mutant: Mutant) -> str:
        """``"killed"``, ``"survived"`` or ``"timeout"``."""
        target = self.tree / mutant.path
        source = target.read_text(encoding="utf-8")
        while True:
            try:
                _write(target, mutant.applied(source))
                tests = tests_of(mutant.path, self.tree, wide=self.wide)
                mutation = mutant.path, source, mutant.applied(source)
                tests = [*score.first(mutant), *tests]
                code, failed = self._run(tests, self.limit_s, mutation)
            finally:
                _write(target, source)
            if code in (-signal.SIGKILL, -signal.SIGXCPU):
                return "timeout"
            if code == 0:
                return "survived"
            if not failed:
                raise RuntimeError(f"no test failed, but pytest ended with {code}: {mutant}")
            if self._pass_without(failed):
                return "killed"

    def _pass_without(self, failed: set[str]) -> bool:
        """Return whether tests fail by the mutation; those that fail anyway are remembered."""
        for test in failed - self.sound:
            # Passing may take longer than failing did; a limit that ends it says nothing.
            code, _ = self._run([test], 5 * self.limit_s)
            (self.sound if code == 0 else self.broken).add(test)
        return bool(failed & self.sound)

    def _run(
        self, tests: list[str], limit_s: int, mutation: tuple[str, str, str] | None = None
    ) -> tuple[int, set[str]]:
        """The exit code (negative: the signal that ended it), and the names of what failed."""
        arguments = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
        # Plugins that torch or transformers loaded already: of the fork, not of the tests.
        arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        for test in sorted(self.broken):
            arguments += ["--deselect" if "::" in test else "--ignore", test]
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_run_tests, args=(limit_s, arguments, mutation, sender)
        )
        process.start()
        process.join(8 * limit_s)  # of the clock, for what waits
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the ranks that it spawned
            process.join()
        failed = set(receiver.recv()) if receiver.poll() else set()
        return process.exitcode or 0, failed


class _Failures:
    """A plugin of pytest that notes what failed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def _run_tests(
    limit_s: int, arguments: list[str], mutation: tuple[str, str, str] | None, sender: Connection
) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    if mutation is None or _take(*mutation):
        failures = _Failures()
        code = int(pytest.main(arguments, plugins=[failures]))
        sender.send(failures.names)
    else:  # what is computed while a module is loaded: all is loaded anew
        command = [sys.executable, "-m", "pytest", "-rfE", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        code = done.returncode
        sender.send(re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE))
    sys.exit(code)


def _take(path: str, source: str, mutated: str) -> bool:
    """Tell whether this process has the mutation now."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    name = name if name.startswith("sp_compiler") else f"sp_compiler.{name}"
    module = sys.modules.get(name)
    return module is None or swap(str(module.__file__), source, mutated)


def _write(path: Path, source: str) -> None:
    """With a time of its own: Python tells a stale ``.pyc`` by seconds and size alone."""
    stamp = max(time.time(), path.stat().st_mtime + 2)
    path.write_text(source, encoding="utf-8")
    os.utime(path, (stamp, stamp))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=90, help="CPU seconds for the tests of one")
    parser.add_argument("--only", nargs="*", default=[""], help="modules whose path starts so")
    parser.add_argument("--kept", nargs="+", help="those of the score with these outcomes")
    parser.add_argument("--wide", action="store_true", help="all fast tests behind those")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    known = score.known_survivors()
    only = tuple(options.only)
    if options.kept:
        chosen = [mutant for mutant in score.kept(options.kept) if mutant.path.startswith(only)]
    else:
        paths = [p for p in modules() if p.relative_to(ROOT).as_posix().startswith(only)]
        chosen = [mutant.in_lines() for mutant in drawn(options.count, options.seed, paths)]
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder).resolve(), options.limit, wide=options.wide)
        for mutant in chosen:
            outcome = runner.outcome(mutant)
            if outcome != "killed" and (mutant.path, mutant.before, mutant.after) in known:
                outcome = "known"
            score.keep(mutant, outcome)
            print(f"{outcome:8}  {mutant}", flush=True)
    for test in sorted(runner.broken):
        print(f"left out, for it fails without a mutation: {test}")
    print(score.summary())


if __name__ == "__main__":
    main()
