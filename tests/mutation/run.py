"""How many of a fixed draw of mutations the fast tests kill.

    python -m tests.mutation.run --count 60 [--seed 0] [--limit 120] [--only passes/normalize]

Each mutation is applied to a copy of the tree, where the tests of the mutated module's folder run
first and a few that compile whole models after them. A mutation is *killed* by the first failure,
*survives* if all pass, and *times out* if the limit ends first, which is not counted as killed.
What survives and is known to change no number is in ``survivors.toml``, with the reason.
"""

from __future__ import annotations

import argparse
import os
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
_COPIED = ("sp_compiler", "passes", "tests", "benchmarks", "examples", "docs", "pyproject.toml")
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


def outcome(mutant: Mutant, tree: Path, limit_s: int) -> str:
    """``"killed"``, ``"survived"`` or ``"timeout"`` of one mutation in a copy of the tree."""
    target = tree / mutant.path
    source = target.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not slow", *tests_of(mutant.path, tree)]
    try:
        _write(target, mutant.applied(source))
        result = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            capture_output=True,
            timeout=20 * limit_s,  # of the clock, for what waits
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s)),
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        _write(target, source)
    if result.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        return "timeout"
    return "survived" if result.returncode == 0 else "killed"


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
        tree = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, tree / name, symlinks=True, ignore=ignore)
            else:
                shutil.copy(source, tree / name)
        for mutant in drawn(options.count, options.seed, paths)[options.start :]:
            found = outcome(mutant, tree, options.limit)
            if found != "killed" and (mutant.path, mutant.before, mutant.after) in known:
                found = "known"
            counts[found] += 1
            print(f"{found:8}  {mutant}", flush=True)
    total = counts.total() - counts["known"]
    print(f"{counts['killed']} of {total} killed: {dict(counts)}")


if __name__ == "__main__":
    main()
