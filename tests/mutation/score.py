"""The kept outcomes of mutations, and the reasons why some can be seen by no test."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

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
    score = json.loads(SCORE.read_text(encoding="utf-8"))
    entries = [(e["path"], e["before"], e["after"]) for e in score if e["outcome"] in outcomes]
    entries.sort(key=lambda entry: hashlib.sha256("\n".join(entry).encode()).digest())
    return [mutant for entry in entries if (mutant := located(*entry)) is not None]


def keep(mutant: Mutant, outcome: str) -> None:
    """Write one outcome to the score, in an order that does not depend on the draw's."""
    score = json.loads(SCORE.read_text(encoding="utf-8"))
    entry = {"path": mutant.path, "before": mutant.before, "after": mutant.after}
    score = [other for other in score if other.items() & entry.items() != entry.items()]
    score.append({**entry, "outcome": outcome})
    score.sort(key=lambda other: (other["path"], other["before"], other["after"]))
    SCORE.write_text(json.dumps(score, indent=1) + "\n", encoding="utf-8")


def tally() -> Counter[str]:
    """Number of mutations of the kept score by outcome."""
    return Counter(entry["outcome"] for entry in json.loads(SCORE.read_text(encoding="utf-8")))
