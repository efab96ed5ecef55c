"""Ranks of the training program that are killed, or hang, under torchrun's restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from benchmarks.kill_runs import PHASES, Disturbance, Runs, drawn


def test_kills_are_drawn_alike_from_a_seed() -> None:
    kills = drawn(200, PHASES, 2, seed=3)
    assert kills == drawn(200, PHASES, 2, seed=3) != drawn(200, PHASES, 2, seed=4)
    assert {kill.phase for kill in kills} == set(PHASES)
    assert {kill.rank for kill in kills} == {0, 1}


@pytest.mark.slow
def test_killed_ranks_go_on_and_hung_ones_are_named(tmp_path: Path) -> None:
    runs = Runs(tmp_path, {"dp_shard": 2}, steps=6, rank_timeout_s=20.0)
    kills = [
        Disturbance("save", 1, 0.01, 0),
        Disturbance("backward", 6, 0.005, 1),
    ]
    runs.run("undisturbed")
    runs.run("killed", kills)
    assert not runs.differences("killed", "undisturbed")
    assert runs.phases("killed").total() == len(kills)

    with pytest.raises(ChildFailedError):
        runs.run("hung", [Disturbance("optimizer", 2, 0.0, 1, hangs=True)], restarts=0)
    said = "\n".join(runs.said("hung"))
    expected = (
        "rank 0 is at the end of step 2 and waits for rank 1, which is at the optimizer of step 2"
    )
    assert expected in said, said
