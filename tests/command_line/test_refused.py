"""One line that says what was typed wrong, before anything is computed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sp_compiler.command_line.app import app

_MODELS = "tests.command_line.models_to_load"


def _stderr(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert not result.stdout
    return result.stderr.strip().splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "expected a model: package.module:callable, a config.json, or --preset NAME"),
        (["plan", "nowhere:make"], "no module 'nowhere'"),
        (["plan", "missing.json"], "no file missing.json"),
        (["plan", ":relu"], "'' is not a module name"),
        (["plan", "../models:relu"], "'../models' is not a module name"),
        (["plan", f"{_MODELS}:relu", "--mesh", "2", "--pp", "2"], "--mesh 2 has the sizes of"),
        (["plan", f"{_MODELS}:relu", "--schedule", "gpipe"], "--schedule is for a pipeline"),
        (["plan", f"{_MODELS}:relu", "--microbatches", "4"], "--microbatches is for a pipeline"),
        (["diff", f"{_MODELS}:relu", "--unified", "--json"], "two output formats"),
        (
            ["diff", f"{_MODELS}:relu", "--other", "x:y", "--tp", "2"],
            "--tp applies to the compilation",
        ),
        (["diff", f"{_MODELS}:relu", "x:y"], f"sp-compiler diff {_MODELS}:relu --other x:y"),
        (
            ["code", f"{_MODELS}:relu", "--output", "x.py", "--json"],
            "--json changes what is printed",
        ),
        (
            ["plan", f"{_MODELS}:relu", "--preset", "gpt-22b"],
            f"{_MODELS}:relu and --preset gpt-22b are both models: give one of them",
        ),
    ],
)
def test_a_command_put_together_wrong(arguments: list[str], message: str) -> None:
    """Its help shows how it is put together."""
    error, hint = _stderr(*arguments)
    assert error.startswith("error: ")
    assert message in error
    assert hint == f"hint: sp-compiler {arguments[0]} --help has the arguments and examples"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", f"{_MODELS}:nothing"], "has no callable 'nothing': "),
        (["plan", f"{_MODELS}:number"], "returned an object of type int: expected a torch.nn."),
        (["plan", f"{_MODELS}:instance"], "instance is a model, built without the options of this"),
        (["plan", f"{_MODELS}:bare_inputs"], "bare_inputs returned a model and inputs; example_"),
        (["plan", f"{_MODELS}:of_a_width"], "needs width: expected a callable without arguments"),
        (["plan", f"{_MODELS}:with_a_tensor"], "expected (args, kwargs)"),
        (["plan", f"{_MODELS}:without_inputs"], "Mlp.forward takes x and no input_ids"),
        (["plan", "setup.py"], "setup.py is Python: expected setup:callable"),
        (["plan", _MODELS], f"such as {_MODELS}:relu or {_MODELS}:gelu or"),
        (["plan", "tests/command_line/models_to_load.py"], f"such as {_MODELS}:relu or {_MODELS}:"),
        (["plan", "tests/command_line/models_to_load.py:relu"], f"is a file: write {_MODELS}:relu"),
        (["plan", f"{_MODELS}:ending"], "ended the process (exit 0)"),
        (["plan", "models.py:relu"], "'models.py:relu' is a file: write models:relu"),
        (["plan", f"{_MODELS}:relu", "--dtype", "int8"], "dtype 'int8'"),
        (["plan", f"{_MODELS}:relu", "--html", "/missing/p.html"], "there is no folder /missing"),
        (["plan", f"{_MODELS}:relu", "--batch", "4"], "relu returns its own inputs"),
        (["plan", f"{_MODELS}:relu", "--mesh", "tp=2,cp=2"], "unknown axis 'cp': expected"),
        (
            ["plan", f"{_MODELS}:relu", "--fits", "80"],
            "--fits='80': expected a positive number with",
        ),
        (["plan", f"{_MODELS}:rellu"], "it has Mlp, relu, gelu"),
        (["plan", f"{_MODELS}:rellu"], "no callable 'rellu': did you mean 'relu'? it has"),
        (["plan", "--preset", "llama3-8b"], "did you mean 'llama-3-8b'? expected one of gpt-22b"),
        (
            ["diff", f"{_MODELS}:relu", "--before", "captured"],
            "mean 'capture'? expected one",
        ),
        (["diff", f"{_MODELS}:relu", "--html", "/missing/d.html"], "there is no folder /missing"),
        (["code", f"{_MODELS}:relu", "--output", "tests"], "--output tests: is a folder"),
        (
            ["diff", f"{_MODELS}:relu", "--before", "begin"],
            "one of capture, final, export",
        ),
        (["diff", f"{_MODELS}:relu", "--before", "final", "--after", "capture"], "comes after"),
        (["plan", "--preset", "gpt-5"], "? expected one of gpt-22b, gpt3-175b"),
        (["plan", f"{_MODELS}:relu", "-o", "full"], "expected NAME=VALUE"),
        (["plan", f"{_MODELS}:relu", "-o", "recompute=all"], "recompute='all': expected one of"),
        (["plan", f"{_MODELS}:relu", "-o", "recompute=ful"], "did you mean 'full'? expected one"),
        (["plan", f"{_MODELS}:broken", "-o", "recompue=x"], "did you mean 'recompute'? expected"),
        (["plan", f"{_MODELS}:broken", "-o", "tp=2"], "-o tp: give --tp"),
        (["plan", f"{_MODELS}:broken", *["-o", "recompute=full"] * 2], "given 2 times: give it"),
        (
            ["plan", f"{_MODELS}:broken", "-o", "hints={}"],
            "-o hints: its values are Python",
        ),
        (
            ["plan", f"{_MODELS}:broken", "-o", "fsdp=1"],
            "-o fsdp: an option of compile for training",
        ),
        (["plan", f"{_MODELS}:relu", "--fits", "80GB"], "--fits='80GB'"),
        (["plan", f"{_MODELS}:relu", "--dtype", "half16"], "dtype 'half16'"),
        (["explain", f"{_MODELS}:relu", "--name", "middle"], "middle"),
        (["diff", f"{_MODELS}:relu", "--before", "loss_only"], "stage 'loss_only': this pass"),
        (
            ["bench", f"{_MODELS}:relu", "--tp", "2"],
            "--tp 2 needs 2 processes, but the number of processes is 1",
        ),
        (["bench", f"{_MODELS}:constant", "--steps", "1"], "there is no backward to measure"),
        (["plan", f"{_MODELS}:relu", "--fits", "80Gib"], 'TiB; did you mean "80GiB"?'),
    ],
)
def test_an_argument_that_is_wrong(arguments: list[str], message: str) -> None:
    """Here the help would say less than the error."""
    (error,) = _stderr(*arguments)
    assert error.startswith("error: ")
    assert message in error
