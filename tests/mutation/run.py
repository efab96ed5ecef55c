"""How many of a fixed draw of mutations the fast tests kill.

    python -m tests.mutation.run --count 60 [--seed 0] [--limit 120] [--only passes/normalize]

Each mutation is applied to a copy of the tree, where the tests named after the module run first,
then a few that compile whole models, then those of its folder. A mutation is *killed* by the first
failure of a test that passes without it, *survives* if all pass, and *times out* if the limit ends
first, which is not counted as killed.
What survives and is known to change no number is in ``survivors.toml``, with the reason.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

from tests.mutation.mutants import ROOT, Mutant, drawn, modules

# Small models through everything: what a folder's own tests do not look at shows up here.
_CORE = ("tests/end_to_end/test_near_misses.py", "tests/end_to_end/test_odd_models.py")
_KNOWN = Path(__file__).with_name("survivors.toml")


def tests_of(path: str, tree: Path) -> list[str]:
    """Test files for a module: its own, what sees wrong numbers anywhere, then its folder's."""
    module = Path(path)
    parts = [part for part in module.parts[:-1] if part != "sp_compiler"]
    folder = Path("tests", *(parts or ["usage"]))  # the top level is what users see
    inner = [folder, *folder.parents][: len(folder.parts) - 1] or [folder]
    files = [found for place in inner for found in sorted((tree / place).glob("test_*.py"))]
    named = [file for file in files if module.stem in file.stem]
    own, others = ([file.relative_to(tree).as_posix() for file in part] for part in (named, files))
    return list(dict.fromkeys([*own, _CORE[0], *others, *_CORE[1:]]))


class Runner:
    """Runs the fast tests on single mutations in a copy of the repository.

    Attributes:
        tree: the copy.
        limit_s: CPU seconds for the tests of one mutation.
        sound: tests that are known to pass without any mutation.
        broken: tests that fail without one: they can kill nothing and are left out.
    """

    def __init__(self, tree: Path, limit_s: int) -> None:
        self.tree = tree
        self.limit_s = limit_s
        self.sound: set[str] = set()
        self.broken: set[str] = set()
        ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore, dirs_exist_ok=True)

    def outcome(self, mutant: Mutant) -> str:
        """``"killed"``, ``"survived"`` or ``"timeout"``."""
        target = self.tree / mutant.path
        source = target.read_text(encoding="utf-8")
        while True:
            try:
                _write(target, mutant.applied(source))
                code, failed = self._run(tests_of(mutant.path, self.tree))
            finally:
                _write(target, source)
            if code in (-signal.SIGKILL, -signal.SIGXCPU):
                return "timeout"
            if code == 0:
                return "survived"
            if self._pass_without(failed):
                return "killed"

    def _pass_without(self, failed: set[str]) -> bool:
        """Whether the mutation is why tests failed; those that fail anyway are remembered."""
        for test in failed - self.sound:
            code, _ = self._run([test])
            (self.sound if code == 0 else self.broken).add(test)
        return not failed or bool(failed & self.sound)

    def _run(self, tests: list[str]) -> tuple[int, set[str]]:
        """The exit code, and the names of what failed."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", *tests]
        for test in sorted(self.broken):
            command += ["--deselect" if "::" in test else "--ignore", test]
        limits = (self.limit_s, self.limit_s)
        try:
            result = subprocess.run(
                command,
                cwd=self.tree,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                capture_output=True,
                text=True,
                timeout=20 * self.limit_s,  # of the clock, for what waits
                check=False,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, limits),
            )
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL, set()
        lines = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", result.stdout, re.MULTILINE)
        return result.returncode, set(lines)


def _write(path: Path, source: str) -> None:
    """With a time of its own: Python tells a stale ``.pyc`` by seconds and size alone."""
    stamp = max(time.time(), path.stat().st_mtime + 2)
    path.write_text(source, encoding="utf-8")
    os.utime(path, (stamp, stamp))


def known_survivors() -> dict[tuple[str, str, str], str]:
    """(path, before, after) to the reason why no test can see it."""
    entries = tomllib.loads(_KNOWN.read_text(encoding="utf-8")).get("survivor", [])
    return {(e["path"], e["before"], e["after"]): e["reason"] for e in entries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--start", type=int, default=0, help="go on from this one of the draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=120, help="CPU seconds for the tests of one")
    parser.add_argument("--only", default="", help="modules whose path starts so")
    options = parser.parse_args()
    known = known_survivors()
    paths = [p for p in modules() if p.relative_to(ROOT).as_posix().startswith(options.only)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder), options.limit)
        for mutant in drawn(options.count, options.seed, paths)[options.start :]:
            found = runner.outcome(mutant)
            if found != "killed" and (mutant.path, mutant.before, mutant.after) in known:
                found = "known"
            counts[found] += 1
            print(f"{found:8}  {mutant}", flush=True)
    total = counts.total() - counts["known"]
    for test in sorted(runner.broken):
        print(f"left out, for it fails without a mutation: {test}")
    print(f"{counts['killed']} of {total} killed: {dict(counts)}")


if __name__ == "__main__":
    main()
