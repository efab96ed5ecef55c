"""The training program: a run that is cut off goes on with the same losses, on other grids too."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers import GPT2Config

from examples.processes import Places, mesh_of
from examples.train import parsed, train
from tests.helpers.ranks import launch
from tests.helpers.rehearsal import run_rehearsed

_STEPS = 4


def _run(folder: Path, name: str, steps: int, *options: str) -> dict[int, dict[str, Any]]:
    args = parsed(
        [
            *("--model", str(folder / "config.json"), "--text", str(folder / "text.txt")),
            *("--folder", str(folder / name), "--sequence-length", "16", "--warmup", "2"),
            *("--lr", "0.01", "--log-every", "1", "--evaluate-every", "2", "--save-every", "2"),
            *("--evaluate-batches", "1", "--steps", str(steps), *options),
        ]
    )
    train(args, mesh_of(args, "cpu"), Places(dist.HashStore()))
    records: dict[int, dict[str, Any]] = {}
    for line in (folder / name / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.setdefault(record.pop("step"), {}).update(record)
    return records


_SQUARE = ("--tp", "2", "--dp-shard", "2", "--batch", "2", "--accumulate", "2")
_WIDE = ("--tp", "4", "--batch", "4", "--accumulate", "2")
_IN_STAGES = ("--pp", "2", "--dp-shard", "2", "--batch", "2", "--accumulate", "2")


def _rehearsal(path: str) -> None:
    """Two steps of each run, which is to compile everything, and no checkpoint."""
    for number, options in enumerate((_SQUARE, _WIDE, _IN_STAGES)):
        with contextlib.suppress(Exception):
            _run(Path(path), f"rehearsal/{number}", 2, *options)


def _runs(path: str) -> list[dict[int, dict[str, Any]]]:
    warnings.simplefilter("ignore")
    folder = Path(path)
    straight = _run(folder, "straight", _STEPS, *_SQUARE)
    # The schedule is that of the full run: it is a failure that cuts a run off.
    first = "step_00000002"
    for name in ("wide", "stages"):
        if dist.get_rank() == 0:
            shutil.copytree(folder / "straight" / first, folder / name / first)
    dist.barrier()
    wide = _run(folder, "wide", _STEPS, *_WIDE)
    stages = _run(folder, "stages", _STEPS, *_IN_STAGES, "--save-every", "1")
    if dist.get_rank() == 0:
        third = "step_00000003"
        shutil.copytree(folder / "stages" / third, folder / "stages_cut" / third)
    dist.barrier()
    stages_cut = _run(folder, "stages_cut", _STEPS, *_IN_STAGES)
    return [straight, wide, stages, stages_cut]


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    config.architectures = ["GPT2LMHeadModel"]
    config.to_json_file(tmp_path / "config.json")
    tmp_path.joinpath("text.txt").write_text("all work and no play makes jack a dull boy\n" * 100)
    found = run_rehearsed(4, _runs, str(tmp_path), rehearsal=_rehearsal)
    straight, wide, stages, stages_cut = found[0]
    measured = ("loss", "norm", "lr", "evaluation_loss")
    for step in (3, 4):
        for name in measured:
            if name in straight[step]:
                # Dropout draws the masks of the one part of the data here.
                assert wide[step][name] == pytest.approx(straight[step][name], rel=0.3)
        # With stages the masks are the same, and only sums come in another order.
        for name in ("loss", "norm"):
            assert stages[step][name] == pytest.approx(straight[step][name], rel=1e-4)
    assert all(stages_cut[4][name] == stages[4][name] for name in measured)
    assert straight[4]["loss"] < straight[1]["loss"]
    assert straight[1]["mfu"] > 0
    assert not list(tmp_path.glob("*/*.partial"))
    weights = [
        load_file(tmp_path / name / "model" / "model.safetensors")
        for name in ("stages", "stages_cut")
    ]
    assert all((weights[0][name] == value).all() for name, value in weights[1].items())


def test_pretrained_weights_are_in_a_folder(tmp_path: Path, capsys: Any) -> None:
    argv = ["--pretrained", "--text", "a.txt", "--folder", "run", "--model"]
    assert parsed([*argv, str(tmp_path)]).pretrained
    with pytest.raises(SystemExit):
        parsed([*argv, "gpt2"])
    assert "save_pretrained wrote" in capsys.readouterr().err


def _program(folder: Path, options: list[str]) -> None:
    """The training program, whose end is that of this process, once both ranks have come to it.

    A rank that ends with an error has the other one ended, however far that has come.
    """
    (folder / f"rank{os.environ['RANK']}").touch()
    while len(list(folder.glob("rank*"))) < 2:
        time.sleep(0.01)
    with mock.patch.object(sys, "argv", ["train", *options]):
        try:
            runpy.run_module("examples.train", run_name="__main__")
        except SystemExit as end:
            # As the interpreter says it, which comes to it behind the log.
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            sys.exit(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "text"),
    [(["--tp", "two"], "invalid int value: 'two'"), (["--tp", "3"], "torchrun started 2")],
)
def test_what_all_ranks_find_is_said_once(options: list[str], text: str, tmp_path: Path) -> None:
    files = ["--model", "gpt2", "--text", "a.txt", "--folder", str(tmp_path)]
    with pytest.raises(ChildFailedError):
        launch(2, tmp_path / "logs", _program, tmp_path, [*files, *options])
    said = [file.read_text() for file in tmp_path.rglob("stderr.log")]
    assert len(said) == 2
    assert "".join(said).count(text) == 1
