"""The command ``sp-compiler``: questions about a model from a terminal or CI, without a script."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sp_compiler.api import plan as make_plan
from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.units import bytes_text, parse_bytes
from sp_compiler.command_line.bench import bench as measure_steps
from sp_compiler.command_line.bench import joined_ranks
from sp_compiler.command_line.doctor import examine, version_option
from sp_compiler.command_line.memory import memory_text
from sp_compiler.command_line.messages import Note, UsageError
from sp_compiler.command_line.models import Loaded, presets
from sp_compiler.command_line.request import (
    FAILED,
    Refused,
    Request,
    check_writable,
    command,
    failures,
    progress,
)
from sp_compiler.compiler import build
from sp_compiler.graph_diff.diff import diff as graph_diff
from sp_compiler.graph_diff.report import GraphDiff
from sp_compiler.grid_plan.data import GridPlan
from sp_compiler.grid_plan.sizes import GridSizes
from sp_compiler.grid_plan.suggest import suggest as find_grids
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.hints import named_or_inside, parameters_of
from sp_compiler.ir.snapshot import Stages, unknown_stage
from sp_compiler.options import CompileOptions
from sp_compiler.planning.plan import Plan
from sp_compiler.verification.verify import verify as verify_model

app = typer.Typer(
    name="sp-compiler",
    callback=version_option,
    help="Tensor and sequence parallelism for unmodified PyTorch models. Exit codes: 0 yes, "
    "1 no (verify, doctor, suggest, plan --fits, diff --exit-code), 2 wrong arguments, "
    "3 the model failed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_Page = Annotated[Path | None, typer.Option(help="Write a page as well.")]
_PLAN_HELP = """Memory, communication and time of one step, without running anything.

Examples:

- `sp-compiler plan --preset mt-nlg-530b --tp 8 --pp 35`

- `sp-compiler plan --preset llama-3-405b --mesh tp=8,pp=16,dp_shard=64 --microbatches 32`

- `sp-compiler plan my_package.models:make --tp 4 -o recompute=full`

- `sp-compiler plan path/to/config.json --sequence 4096 --fits 80GiB --json`
"""
_SUGGEST_HELP = """The fastest grids on which a model trains within a memory limit; 1 if none fits.

Examples:

- `sp-compiler suggest --preset mt-nlg-530b --gpus 280 --memory 75GiB --microbatches 280`
"""
_DIFF_HELP = """Changes that the compiler makes to a model, or differences between two models.

Examples:

- `sp-compiler diff --preset llama-3-8b --before capture --after final`

- `sp-compiler diff models:old --other models:new --html diff.html --exit-code`
"""
_VERIFY_HELP = """Compare outputs and all gradients with the model on simulated ranks; 1 if wrong.

Examples:

- `sp-compiler verify my_package.models:make_small --tp 4`

- `sp-compiler verify tiny/config.json --sequence 16 --json`
"""
_CODE_HELP = """The Python that a rank would run.

Examples:

- `sp-compiler code --preset llama-3-8b --output block.py`
"""
_EXPLAIN_HELP = """Why parameters are sharded or not, and what the alternatives would cost.

Examples:

- `sp-compiler explain --name model.layers.0.mlp.up_proj --preset llama-3-8b`
"""
_BENCH_HELP = """Time and memory of a training step here: eager torch and the compiled model.

Examples:

- `sp-compiler bench my_package.models:make --steps 20`

- `torchrun --standalone --nproc-per-node 2 -m sp_compiler bench tiny/config.json --json`
"""
_DOCTOR_HELP = """Versions, devices, links, process group, and whether a small model compiles."""


@app.command(help=_PLAN_HELP)
@command
def plan(
    request: Request,
    *,
    mesh: Annotated[
        str | None,
        typer.Option(help="Ranks by axis: tp=8,pp=4,dp_shard=16, or 8x4x2 (tp, pp, dp_replicate)."),
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages, without --mesh.")] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Of one step.")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="Of the stages, as of pipeline(); 1f1b if not given.")
    ] = None,
    stages_per_rank: Annotated[int | None, typer.Option(min=1, help="If interleaved.")] = None,
    fits: Annotated[
        str | None, typer.Option(help="Exit with 1 if a device needs more, such as 80GiB.")
    ] = None,
    html: _Page = None,
) -> None:
    # Usage errors are raised before the model is built, which may take minutes.
    if mesh is not None and (pp is not None or request.tp is not None):
        raise UsageError(f"--mesh {mesh} has the sizes of --tp and --pp: leave these out")
    limit = None if fits is None else parse_bytes("--fits", fits)
    check_writable("--html", html)
    loaded = request.load()
    sizes = GridSizes(request.ranks(loaded), pp or loaded.pp)
    grid = sizes if mesh is None else GridSizes.of(mesh)
    on_grid = mesh is not None or grid.pp > 1
    if not on_grid:
        why = "is for a pipeline or a grid: give --pp or --mesh, or leave it out"
        _refuse(why, microbatches=microbatches, schedule=schedule, stages_per_rank=stages_per_rank)
    result: Plan | GridPlan
    with progress("planning"):
        if on_grid:
            result = make_plan(
                loaded.model,
                loaded.example_inputs,
                mesh=vars(grid),
                # At least one per stage, as most schedules need.
                microbatches=microbatches or max(grid.pp, loaded.microbatches // grid.data),
                schedule=schedule or "1f1b",
                stages_per_rank=stages_per_rank,
                **request.options,
            )
        else:
            result = make_plan(loaded.model, loaded.example_inputs, tp=grid.tp, **request.options)
    if html is not None:
        result.to_html(html)
    if request.json:
        typer.echo(json.dumps(_plan_data(result), indent=2))
    else:
        typer.echo(loaded.inputs_text)
        typer.echo(str(result) if isinstance(result, Plan) else memory_text(result))
    # After the table, so that a CI job has both the reason and the exit code.
    if limit is not None and result.total_bytes > limit:
        raise Refused(f"needs {bytes_text(result.total_bytes)}, more than {bytes_text(limit)}")


def _refuse(reason: str, **options: object) -> None:
    """Raise an error for the first of ``options`` that was given, because it would have no
    effect."""
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} {reason}")


def _plan_data(result: Plan | GridPlan) -> dict[str, Any]:
    if isinstance(result, Plan):
        return {**result.to_dict(), "grid": None}
    data = result.to_dict()
    return {**data.pop("microbatch"), "grid": data}


@app.command(help=_SUGGEST_HELP)
@command
def suggest(
    request: Request,
    *,
    gpus: Annotated[int, typer.Option(min=1, help="Number of devices.")],
    memory: Annotated[str, typer.Option(help="Of each device, such as 75GiB.")],
    microbatches: Annotated[
        int | None, typer.Option(min=1, help="Of one step, over all devices.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of plans.")] = 5,
) -> None:
    if request.tp is not None:
        raise UsageError("--tp: suggest finds it; leave it out")
    parse_bytes("--memory", memory)
    loaded = request.load()
    with progress(f"searching the grids of {gpus} devices"):
        suggestions = find_grids(
            loaded.model,
            loaded.example_inputs,
            gpus=gpus,
            memory=memory,
            # At least one per device: a grid of only data-parallel ranks needs that many.
            microbatches=microbatches or max(loaded.microbatches, gpus),
            top=top,
            **request.options,
        )
    typer.echo(suggestions.to_json() if request.json else str(suggestions))
    # After the table, which shows what each grid would need.
    if not suggestions:
        raise Refused(f"no grid of {gpus} devices fits {memory} on each")


@app.command(help=_DIFF_HELP)
@command
def diff(  # noqa: PLR0913 - one for each argument of the command line
    request: Request,
    *,
    extra: Annotated[str | None, typer.Argument(hidden=True, metavar="--other model")] = None,
    other: Annotated[str | None, typer.Option(help="A second model, given like the first.")] = None,
    before: Annotated[
        str | None, typer.Option(help="A stage of the compilation; capture if not given.")
    ] = None,
    after: Annotated[str | None, typer.Option(help="A later one; final if not given.")] = None,
    unified: Annotated[bool, typer.Option("--unified", help="As diff -u writes it.")] = False,
    context: Annotated[int, typer.Option(min=0, help="Unchanged nodes around a change.")] = 3,
    html: _Page = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="1 if they differ.")] = False,
) -> None:
    if extra is not None:
        raise UsageError(
            f"a second model comes after --other: sp-compiler diff {request.model} --other {extra}"
        )
    check_writable("--html", html)
    if unified and request.json:
        raise UsageError("--unified and --json are two output formats: give one of them")
    if other is not None:
        # Two models are compared as they are: neither is compiled.
        reason = "applies to the compilation of one model: leave it out with --other"
        _refuse(reason, before=before, after=after, tp=request.tp, option=request.option)
    before, after = before or "capture", after or "final"
    _check_order(before, after)
    first = request.load()
    if other is None:
        with progress("compiling"):
            stages = _compiled(request, first).stages
        result = _diff_of_stages(stages, before, after)
    else:
        # The same sizes for both models, so that only the models differ.
        second = Request(**{**vars(request), "model": other, "preset": None}).load()
        with progress("comparing"):
            result = graph_diff(first.model, second.model, example_inputs=first.example_inputs)
    if html is not None:
        result.to_html(html, context)
    console = Console()
    if request.json:
        typer.echo(result.to_json())
    # To a file or a pipe, write a unified diff, which other tools can read.
    elif unified or not console.is_terminal:
        typer.echo(result.to_unified(context))
    else:
        console.print(result.side_by_side(context))
    # Only on request, as in git diff: a difference is not a failure.
    if exit_code and not result.is_empty:
        raise typer.Exit(FAILED)


@app.command(help=_VERIFY_HELP)
@command
def verify(request: Request, *, html: _Page = None) -> None:
    check_writable("--html", html)
    # On the CPU, because values are compared; other commands need only shapes.
    loaded = request.load(device="cpu")
    with progress("verifying"):
        report = verify_model(
            loaded.model, loaded.example_inputs, tp=request.tp or 2, **request.options
        )
    if html is not None:
        report.to_html(html)
    typer.echo(report.to_json() if request.json else str(report))
    # Without another message: the report says what is wrong.
    if not report.ok:
        raise typer.Exit(FAILED)


@app.command(help=_CODE_HELP)
@command
def code(
    request: Request,
    *,
    output: Annotated[Path | None, typer.Option(help="Write it there.")] = None,
) -> None:
    check_writable("--output", output)
    if output is not None and request.json:
        raise UsageError("--json changes what is printed, --output writes Python: give one of them")
    loaded = request.load()
    with progress("compiling"):
        text = _compiled(request, loaded).code
    if output is not None:
        output.write_text(text, encoding="utf-8")
        warnings.warn(Note(f"wrote {output}"), stacklevel=1)
    else:
        typer.echo(json.dumps({"code": text}) if request.json else text)


@app.command(help=_EXPLAIN_HELP)
@command
def explain(
    request: Request,
    *,
    name: Annotated[str, typer.Option(help="A parameter or module, * for any part of it.")],
) -> None:
    loaded = request.load()
    named_or_inside(name, parameters_of(loaded.model))  # raises an error before the solver runs
    with progress("solving"):
        result = make_plan(
            loaded.model, loaded.example_inputs, tp=request.ranks(loaded), **request.options
        )
        # Inside the progress: explain() runs the solver for each alternative.
        text = str(result.explain(name))
    typer.echo(json.dumps({"explanation": text}) if request.json else text)


@app.command(help=_BENCH_HELP)
@command
def bench(
    request: Request,
    *,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps that are timed.")] = 10,
) -> None:
    with joined_ranks(request.tp) as (num_ranks, device):
        loaded = request.load(device)
        with progress(f"measuring {steps} steps"):
            result = measure_steps(
                loaded.model, loaded.example_inputs, num_ranks, steps, request.options
            )
    # Each rank has measured its own step; one is shown.
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(result.to_dict(), indent=2) if request.json else str(result))


@app.command(help=_DOCTOR_HELP)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="JSON for a program to read.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show Python tracebacks.")] = False,
) -> None:
    with failures("doctor", traceback=traceback), progress("compiling a small model"):
        facts = examine()
    lines = "\n".join(map(str, facts))
    typer.echo(json.dumps([vars(fact) for fact in facts], indent=2) if as_json else lines)
    if not all(fact.ok for fact in facts):
        raise typer.Exit(FAILED)


@app.command("presets")
def list_presets(
    as_json: Annotated[bool, typer.Option("--json", help="JSON for a program to read.")] = False,
) -> None:
    """Models known by name; `presets.toml` has the source of each number."""
    known = presets()
    lines = (f"{name:<14} tp {each['tp']}, pp {each['pp']}" for name, each in known.items())
    typer.echo(json.dumps(known, indent=2) if as_json else "\n".join(lines))


def _check_order(before: str, after: str) -> None:
    """Raise an error for a name that is not a stage of any compilation, and for stages in the
    wrong order."""
    # User passes, which have stages too, cannot be named here; these two change no graph.
    passes: list[Pass] = [each for each in Pass if each not in (Pass.CHECK, Pass.CODEGEN)]
    known = {**Stages.ALIASES, **{str(each): each for each in passes}}
    for name in (before, after):
        if name not in known:
            raise unknown_stage(name, known)
    if passes.index(known[before]) > passes.index(known[after]):
        raise ArgumentError(f"--before {before} --after {after}: {before} comes after {after}")


def _diff_of_stages(stages: Stages, before: str, after: str) -> GraphDiff:
    for name in (before, after):
        if name not in (*stages, *Stages.ALIASES):  # a pass that did not run
            raise unknown_stage(name, stages)
    return graph_diff(stages[before], stages[after])


def _compiled(request: Request, loaded: Loaded) -> CompiledProgram:
    args, kwargs = loaded.example_inputs
    options = CompileOptions.of(request.ranks(loaded), request.options)
    return build(loaded.model, args, dict(kwargs), options)


def main() -> None:
    """Entry point of the command."""
    app()
