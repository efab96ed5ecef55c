"""``sp-compiler`` as it is typed: answers, exit codes, one line and a hint for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

import sp_compiler
from sp_compiler.command_line import models
from sp_compiler.command_line.app import app
from sp_compiler.command_line.models import presets
from tests.helpers.tiny_llama import write_config

ROOT = Path(__file__).parents[2]
_MODELS = "tests.command_line.models_to_load"


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path, dtype="bfloat16")


def test_versions() -> None:
    result = _run("--version")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"sp_compiler {sp_compiler.__version__}, torch {torch.__version__}\n"


def test_plan_of_a_callable() -> None:
    result = _run("plan", f"{_MODELS}:relu", "--tp", "2", "-o", "recompute=none")
    assert result.exit_code == 0, result.output
    assert "Mlp on 2 tensor-parallel ranks, recompute=none" in result.stdout
    assert result.stdout.startswith("inputs: x float32[4, 8]; float32\n")


@pytest.mark.slow
def test_plan_of_a_configuration_with_a_pipeline(config: Path, tmp_path: Path) -> None:
    sizes = ("--tp", "2", "--pp", "2", "--microbatches", "4", "--sequence", "16")
    result = _run("plan", str(config.parent), *sizes, "--html", str(tmp_path / "plan.html"))
    assert "schedule 1f1b" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert result.exit_code == 0, result.output
    assert "2 pipeline stages, schedule 1f1b, 4 microbatches" in result.stdout
    assert "weights, 16 bits" in result.stdout
    assert "x LlamaDecoderLayer" in result.stdout
    plain = json.loads(_run("plan", str(config), *sizes, "--json").stdout)
    stages = plain["grid"]["stages"]
    assert len(stages) == 2
    for stage in stages:
        assert stage["state_bytes"] == 18 * stage["parameters"]
        parts = stage["state_bytes"] + stage["activation_bytes"] + stage["working_bytes"]
        assert stage["total_bytes"] == parts
    assert "bfloat16" in {kept["dtype"] for block in plain["blocks"] for kept in block["kept"]}


def test_stdout_has_the_result_alone(capfd: pytest.CaptureFixture[str]) -> None:
    result = _run("plan", f"{_MODELS}:printing", "--tp", "2", "--json")
    assert json.loads(result.stdout)
    written = capfd.readouterr()
    assert "from C" not in written.out
    # Where no spinner is shown, a long step says once that it begins.
    assert written.err == "from Cplanning ...\n"


def test_a_limit_decides_the_exit_code() -> None:
    assert _run("plan", f"{_MODELS}:relu", "--fits", "1GiB").exit_code == 0
    result = _run("plan", f"{_MODELS}:relu", "--fits", "1KiB")
    assert result.exit_code == 1
    assert "more than 1.00 KiB" in result.stderr


def test_suggest_says_no_when_nothing_fits() -> None:
    sizes = ("--gpus", "2", "--microbatches", "2", "-o", "recompute=full")
    result = _run("suggest", f"{_MODELS}:relu", *sizes, "--memory", "1GiB", "--json")
    assert result.exit_code == 0, result.output
    assert {plan["pp"] for plan in json.loads(result.stdout)["plans"]} == {1}  # it has no loss
    assert _run("suggest", f"{_MODELS}:relu", *sizes, "--memory", "1KiB").exit_code == 1


def test_diff_of_stages_and_of_models() -> None:
    stages = _run("diff", f"{_MODELS}:relu", "--tp", "2")
    assert stages.exit_code == 0, stages.output
    assert "--- capture: " in stages.stdout
    assert "+++ final: " in stages.stdout
    assert "all_reduce" in stages.stdout
    pair = [f"{_MODELS}:relu", "--other", f"{_MODELS}:gelu", "--exit-code"]
    versions = _run("diff", *pair)
    assert versions.exit_code == 1
    assert "aten.gelu" in versions.stdout
    same = _run("diff", f"{_MODELS}:relu", "--other", f"{_MODELS}:relu", "--exit-code")
    assert same.exit_code == 0
    assert _run("diff", f"{_MODELS}:relu", "--after", "end").exit_code == 2


def test_diff_writes_a_page(tmp_path: Path) -> None:
    result = _run("diff", f"{_MODELS}:relu", "--html", str(tmp_path / "diff.html"), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["counts"]
    assert (tmp_path / "diff.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_verify_says_yes() -> None:
    result = _run("verify", f"{_MODELS}:relu", "--tp", "2", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"] is True


def test_bench_measures_both() -> None:
    result = _run("bench", f"{_MODELS}:relu", "--steps", "1", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["model_name"] == "Mlp"
    # The results of the activation and of down, which the next operators' gradients read.
    assert data["eager"]["kept_bytes"] == 4 * (32 + 8) * 4
    assert 0 < data["compiled"]["kept_bytes"] <= data["eager"]["kept_bytes"]
    assert data["time_ratio"] == data["compiled"]["step_us"] / data["eager"]["step_us"]


def test_code_is_python(tmp_path: Path) -> None:
    result = _run("code", f"{_MODELS}:relu", "--tp", "2", "--output", str(tmp_path / "code.py"))
    assert result.exit_code == 0, result.output
    assert result.stderr == f"wrote {tmp_path / 'code.py'}\n"
    compile((tmp_path / "code.py").read_text(encoding="utf-8"), "code.py", "exec")


def test_explain() -> None:
    result = _run("explain", f"{_MODELS}:relu", "--name", "up", "--tp", "2")
    assert result.exit_code == 0, result.output
    assert "up.weight" in result.stdout


def test_doctor_lists_what_is_needed_and_tries_a_model() -> None:
    result = _run("doctor", "--json")
    facts = {fact["name"]: fact for fact in json.loads(result.stdout)}
    assert {"python", "torch", "rich", "transformers", "backends", "a small model"} <= facts.keys()
    assert facts["a small model"]["ok"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": [3]}, 'has no "architectures", a list'),
        ({"architectures": "LlamaForCausalLM"}, 'has no "architectures", a list'),
        ({"architectures": ["LlamaConfig"]}, "LlamaConfig of transformers is not a model"),
        ({"architectures": ["LamaForCausalLM"]}, "did you mean 'LlamaForCausalLM'?"),
        ({"dtype": "float99"}, "dtype 'float99'"),
    ],
)
def test_configurations_that_are_wrong(config: Path, fields: dict[str, Any], message: str) -> None:
    _change(config, fields)
    result = _run("plan", str(config))
    assert result.exit_code == 2, result.output
    assert message in result.stderr.splitlines()[0]


@pytest.mark.slow
def test_a_configuration_saved_without_a_model(config: Path) -> None:
    """``config.save_pretrained()`` names no class: that of AutoModelForCausalLM is meant."""
    named = _run("code", str(config), "--sequence", "16", "--tp", "1")
    _change(config, {"architectures": None, "model_type": "llama"})
    result = _run("code", str(config), "--sequence", "16", "--tp", "1")
    assert result.stdout == named.stdout
    assert result.stderr == f'{config} has no "architectures": building LlamaForCausalLM\n'
    _change(config, {"model_type": "vit"})
    assert f'{config}: it has no "architectures", a list' in _run("plan", str(config)).stderr
    _change(config, {"model_type": "lama"})
    unknown = (
        f"{transformers.__version__} has no model_type 'lama': did you mean 'llama'? and it has"
    )
    assert unknown in _run("plan", str(config)).stderr


def test_a_field_of_a_wrong_type_is_named_with_its_type(config: Path) -> None:
    _change(config, {"hidden_size": "x"})
    error, hint = _run("plan", str(config)).stderr.strip().splitlines()
    assert "'hidden_size'" in error
    assert "expected int" in error
    assert hint.startswith("hint: --traceback shows the rest")


def test_a_model_larger_than_memory_is_not_built(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_free_bytes", lambda: 1024)
    result = _run("verify", str(config), "--sequence", "16")
    assert result.exit_code == 2, result.output
    assert "in float64, but 1.00 KiB of memory are free" in result.stderr


@pytest.mark.slow
def test_inputs_are_no_longer_than_the_positions_of_a_model(tmp_path: Path) -> None:
    config = {"architectures": ["BertModel"], "num_hidden_layers": 1, "hidden_size": 32}
    config |= {"num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 48}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    assert _run("plan", str(path), "--tp", "2").exit_code == 0
    command = [sys.executable, "-W", "ignore", "-m", "sp_compiler"]
    arguments = ["plan", str(path), "--sequence", "49"]
    typed = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    step, error, hint = typed.stderr.splitlines()  # and nothing of torch's log
    assert step == "planning ..."
    assert "captured as one graph" in error
    assert "run it once without compiling" in hint


def test_inputs_whose_numbers_decide_are_made_on_the_cpu() -> None:
    result = _run("plan", f"{_MODELS}:masked")
    assert result.exit_code == 3
    assert "hint: make these inputs with device='cpu'" in result.stderr
    result = _run("plan", f"{_MODELS}:masked_with_numbers")
    assert result.exit_code == 0, result.output


def _change(config: Path, fields: dict[str, Any]) -> None:
    known = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**known, **fields}), encoding="utf-8")


@pytest.mark.parametrize(
    ("model", "message", "advice"),
    [
        ("broken", "RuntimeError: no such weights, at ", "the model's own code raised this"),
        ("too_wide", "RuntimeError: ", "run it once without compiling"),
        ("data_dependent", "models_to_load.py:", "choose with torch.where"),
    ],
)
def test_models_that_fail(model: str, message: str, advice: str) -> None:
    result = _run("plan", f"{_MODELS}:{model}")
    assert result.exit_code == 3
    error, hint = result.stderr.strip().splitlines()
    assert message in error
    assert error.count("models_to_load.py:") == 1
    assert advice in hint
    assert "--traceback" in hint
    assert "Traceback (most recent" in _run("plan", f"{_MODELS}:{model}", "--traceback").stderr


def test_unknown_option_of_compile() -> None:
    result = _run("plan", f"{_MODELS}:relu", "-o", "speed=fast")
    assert result.exit_code == 2, result.output
    assert "speed" in result.stderr


@pytest.mark.parametrize(
    "command", ["plan", "suggest", "diff", "verify", "bench", "code", "explain"]
)
def test_help_has_examples(command: str) -> None:
    result = _run(command, "--help")
    assert result.exit_code == 0
    assert f"sp-compiler {command} " in " ".join(result.stdout.replace("│", " ").split())


def test_presets_are_what_their_names_say() -> None:
    """Parameters in billions by the class of transformers, of weights without memory."""
    billions = {"gpt-22b": 22, "gpt3-175b": 175, "mt-nlg-530b": 530, "gpt-1t": 1000}
    billions |= {"llama-3-8b": 8, "llama-3-70b": 70, "llama-3-405b": 405}
    known = presets()
    assert list(known) == list(billions)
    for name, preset in known.items():
        assert preset["global_batch"] % preset["batch"] == 0
        assert _billions(preset) == pytest.approx(billions[name], rel=0.04), name


def _billions(preset: dict[str, Any]) -> float:
    """By arithmetic: 12 h² of a GPT layer, or the matrices of a Llama's, and the embeddings."""
    c = preset["config"]
    if preset["family"] == "GPT2LMHeadModel":
        return float(c["n_layer"] * 12 * c["n_embd"] ** 2 + c["vocab_size"] * c["n_embd"]) / 1e9
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    attention = 2 * hidden**2 * (1 + c["num_key_value_heads"] / heads)
    mlp = 3 * hidden * c["intermediate_size"]
    embeddings = 2 * c["vocab_size"] * hidden
    return float(c["num_hidden_layers"] * (attention + mlp) + embeddings) / 1e9


def test_presets_name_classes_of_transformers() -> None:
    for preset in presets().values():
        fields = getattr(transformers, preset["family"]).config_class().to_dict()
        assert preset["config"].keys() - {"rope_theta"} <= fields.keys()


def _completed(text: str) -> list[str]:
    """Words that a shell offers for the last word of ``text``."""
    words = {"COMP_WORDS": text, "COMP_CWORD": str(len(text.split(" ")) - 1)}
    environment = {"_SP_COMPILER_COMPLETE": "complete_bash", **words}
    return CliRunner().invoke(app, prog_name="sp-compiler", env=environment).stdout.split()


def test_completion_knows_commands_presets_and_options_of_compile() -> None:
    assert _completed("sp-compiler be") == ["bench"]
    assert _completed("sp-compiler plan --preset llama-3-8") == ["llama-3-8b"]
    assert _completed("sp-compiler plan -o rec") == ["recompute=", "recompute_rest="]


@pytest.mark.slow
def test_module_and_completion_as_a_shell_runs_them() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "sp_compiler"]
    shown = subprocess.run([*command, "presets"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "mt-nlg-530b" in shown.stdout
    nothing = _run()
    assert nothing.exit_code == 2
    assert "--install-completion" in nothing.output
