"""The kept outcomes of mutations, and the reasons why some can be seen by no test."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, located

KNOWN = Path(__file__).with_name("survivors.toml")
SCORE = Path(__file__).with_name("score.json")


def known_survivors() -> dict[tuple[str, str, str], str]:
    """(path, before, after) to the reason why no test can see it."""
    entries = tomllib.loads(KNOWN.read_text(encoding="utf-8")).get("survivor", [])
    return {(e["path"], e["before"], e["after"]): e["reason"] for e in entries}


def kept(outcomes: Sequence[str]) -> list[Mutant]:
    """Mutations of the kept score with one of ``outcomes``, of all folders in turn.

    Where the code has changed since, there is nothing left to mutate: those are left out.
    """
    entries = [(e["path"], e["before"], e["after"]) for e in _entries() if e["outcome"] in outcomes]
    entries.sort(key=lambda entry: hashlib.sha256("\n".join(entry).encode()).digest())
    return [mutant for entry in entries if (mutant := located(*entry)) is not None]


def first(mutant: Mutant) -> list[str]:
    """Test files of other modules that are known to see it: ``tests`` of its entry."""
    entries = (entry for entry in _entries() if entry.items() >= _identity(mutant).items())
    return [file for entry in entries for file in entry.get("tests", ())]


def keep(mutant: Mutant, outcome: str) -> None:
    """Write one outcome to the score, in an order that does not depend on the draw's."""
    entries, identity = _entries(), _identity(mutant)
    before = next((entry for entry in entries if entry.items() >= identity.items()), identity)
    entries = [entry for entry in entries if entry is not before]
    entries.append({**before, "outcome": outcome})
    entries.sort(key=lambda entry: (entry["path"], entry["before"], entry["after"]))
    SCORE.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(SCORE.read_text(encoding="utf-8"))
    return entries


def _identity(mutant: Mutant) -> dict[str, Any]:
    return {"path": mutant.path, "before": mutant.before, "after": mutant.after}


def summary() -> str:
    """How many of those that were tried, and that can be noticed, were killed."""
    outcomes = Counter(entry["outcome"] for entry in _entries())
    judged = outcomes["killed"] + outcomes["survived"] + outcomes["timeout"]
    return f"{outcomes['killed']} of {judged} killed in {SCORE.name}: {dict(outcomes)}"
