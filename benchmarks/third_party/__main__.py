"""Compile models of other people's packages and compare them with themselves in eager mode.

``python -m benchmarks.third_party [--write] [--eager] [names...]`` runs the named models, or all
whose package is installed (``pip install -c constraints.txt PACKAGE...``); others are listed as
skipped. Each model trains one step on two simulated ranks, in float64 with its own casts; loss and
every gradient are compared with the uncompiled model. ``--write`` keeps what it finds in
``benchmarks/results/third_party.json`` and renders ``docs/third_party.md``; ``--eager`` only builds
and runs the models.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shares import flops_share, parameter_share
from benchmarks.third_party.audio_and_diffusion import (
    diffusers_entries,
    speechbrain_entries,
    torchaudio_entries,
)
from benchmarks.third_party.entry import Entry, NotSmallError, Projected
from benchmarks.third_party.text import (
    esm_entries,
    litgpt_entries,
    torchtune_entries,
    x_transformers_entries,
)
from benchmarks.third_party.transformers_models import transformers_entries
from benchmarks.third_party.vision import (
    open_clip_entries,
    timm_entries,
    torchvision_entries,
    vit_pytorch_entries,
)
from benchmarks.third_party.wheels import import_without_kernels
from sp_compiler.base.errors import SPCompilerError
from sp_compiler.options import CompileOptions
from sp_compiler.planning.build import make_plan
from tests.helpers import parity
from tests.models import zoo

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results" / "third_party.json"
PAGE = _ROOT / "docs" / "third_party.md"
_RANKS = 2
# Relative to the largest gradient. Models that always compute in float32 round by this much.
_EXACT, _OWN_CASTS = 1e-9, 1e-6
# How many times the change by one rounding of each weight an error may be: there are more
# operators, each with its own, than weights.
_ROUNDINGS = 10
_HEAD = """# Models of other packages

Written by `python -m benchmarks.third_party --write` from real runs; not edited by hand.

Which models does sp_compiler handle that were not written with it in mind? Each model is its
package's own, unmodified, in a small configuration (two layers if the package has an option for
that): one training step in float64 without dropout on two simulated ranks, compared with the
uncompiled model. The models of transformers are not hand-picked: they come from its own lists for
five tasks, as far as they have been run. Left out are models on the [coverage](coverage.md) page,
and those that one rule for sizes (`benchmarks/third_party/transformers_models.py`) leaves with more
than 30 million parameters or unable to run.

- *right*: the loss and all gradients agree within 1e-9 of the largest gradient. For a model that
  itself computes in float32, which adds rounding: within 1e-6, or within 1e-9 if its casts go to
  float64. For an ill-conditioned model: within ten times the change of its own gradients if each
  weight is rounded differently. *WRONG*: they do not agree. *refused*: the compiler raised the
  error in the last column.
- *error*: the largest difference, relative to the largest gradient, or to the loss.
- *FLOPs*, *parameters*: the sharded share of the forward's matrix-product FLOPs, and of the bytes
  of parameters with two or more dims.
- *replicated*: operators and parameters left replicated. *compile s*: CPU seconds to compile.
"""


@dataclass(frozen=True)
class Record:
    """Outcome for one model.

    Attributes:
        version: of the package.
        verdict: ``right``, ``WRONG`` or ``refused``.
        error: of the worst gradient or of the loss, beside the largest; ``None`` if refused.
        flops, parameters: shares that are sharded, ``None`` if refused.
        fallbacks: operators and parameters that run replicated.
        note: the error's first line, or the mode that the model ran in.
        seconds: CPU time of the compilation.
    """

    version: str
    verdict: str
    error: float | None = None
    flops: float | None = None
    parameters: float | None = None
    fallbacks: int = 0
    note: str = ""
    seconds: float = 0.0


def entries() -> list[Entry]:
    """The whole list, in a fixed order."""
    return [
        *timm_entries(),
        *torchvision_entries(),
        *vit_pytorch_entries(),
        *open_clip_entries(),
        *x_transformers_entries(),
        *torchtune_entries(),
        *litgpt_entries(),
        *esm_entries(),
        *diffusers_entries(),
        *torchaudio_entries(),
        *speechbrain_entries(),
        *transformers_entries(),
    ]


def run(entry: Entry) -> Record:
    """Compile one model and compare a step of it with its own."""
    version = importlib.metadata.version(entry.package)
    model, inputs, mode = prepared(entry)
    eager = copy.deepcopy(model)
    loss = eager(**inputs)
    loss.backward()
    try:
        start = time.process_time()
        case = parity.make_case(model, inputs, lift_casts=False)
        compiled = parity.compiled(case, tp=_RANKS)
        seconds = time.process_time() - start
        step = parity.simulate(case, compiled)
    except SPCompilerError as refusal:
        return Record(version, "refused", note=str(refusal).strip().splitlines()[0])
    true = {name: parameter.grad for name, parameter in eager.named_parameters()}
    error = max(
        parity.gradient_error(step.grads, true, floor=1e-3),
        float((step.outputs[0] - loss).detach().abs() / loss.detach().abs()),
    )
    casts, note = _casts(case), mode
    right = error < (_OWN_CASTS if casts else _EXACT)
    if casts and not right:
        lifted = _error_without_casts(model, inputs)
        right = lifted < _EXACT
        note = "; ".join(filter(None, [mode, f"{lifted:.0e} without its casts to float32"]))
    elif not right:
        rounded = _error_of_rounded_weights(model, inputs, true)
        right = error < _ROUNDINGS * rounded
        note = "; ".join(filter(None, [mode, f"{rounded:.0e} with weights rounded another way"]))
    return Record(
        version,
        "right" if right else "WRONG",
        error,
        flops_share(case.program, compiled),
        parameter_share(compiled),
        len(make_plan(compiled, CompileOptions(tp=_RANKS)).fallbacks),
        note,
        round(seconds, 1),
    )


def _error_without_casts(model: nn.Module, inputs: dict[str, Any]) -> float:
    """Return the error where the model's own casts are to float64, against one rank likewise."""
    case = parity.make_case(model, inputs, lift_casts=True)
    step = parity.simulate(case, parity.compiled(case, tp=_RANKS))
    return parity.gradient_error(step.grads, case.grads, floor=1e-3)


def _error_of_rounded_weights(
    model: nn.Module, inputs: dict[str, Any], true: dict[str, Tensor | None]
) -> float:
    """Return by how much eager gradients change if each weight is the number next to it."""
    eager = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in eager.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            ends = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(parameter.nextafter(ends))
    eager(**inputs).backward()
    grads = {name: parameter.grad for name, parameter in eager.named_parameters()}
    return parity.gradient_error(grads, true, floor=1e-3)


def prepared(entry: Entry) -> tuple[nn.Module, dict[str, Any], str]:
    """The model with its loss in float64, its inputs, and a note if it is in evaluation mode.

    Dropout is off. A model that draws other random numbers in training has no unique gradient: it
    is compared in evaluation mode.
    """
    torch.manual_seed(0)
    model = Projected(entry.make())
    zoo.randomise(model, 0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = model.double().train()
    args, kwargs = torch.utils._pytree.tree_map_only(
        Tensor, lambda x: x.double() if x.is_floating_point() else x, entry.inputs()
    )
    inputs = {"args": args, "kwargs": kwargs}
    before = torch.get_rng_state()
    try:
        copy.deepcopy(model)(**inputs)
    except RuntimeError as error:  # such as a weight that is cast
        raise NotSmallError(f"does not run in float64: {error}") from error
    if torch.equal(torch.get_rng_state(), before):
        return model, inputs, ""
    return model.eval(), inputs, "in evaluation mode: draws random numbers in training"


def _casts(case: parity.Case) -> bool:
    """Return whether the model makes floating numbers of less than float64."""
    values = (
        node.meta.get("val")
        for call in case.program.calls
        for node in call.region.module.graph.nodes
    )
    return any(
        isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
        for value in values
    )


def load() -> dict[str, dict[str, Record]]:
    """Stored outcomes, by package and model."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return {
        package: {name: Record(**record) for name, record in models.items()}
        for package, models in kept.items()
    }


def page(records: dict[str, dict[str, Record]]) -> str:
    """The text of ``docs/third_party.md``."""
    every = [record for models in records.values() for record in models.values()]
    counts = ", ".join(
        f"{sum(record.verdict == verdict for record in every)} {verdict}"
        for verdict in ("right", "refused", "WRONG")
    )
    parts = [_HEAD, f"{len(every)} models: {counts}.\n"]
    for package in sorted(records):
        models = records[package]
        version = next(iter(models.values())).version
        parts += [
            f"## {package} {version}\n",
            "| model | verdict | error | FLOPs % | parameters % | replicated | compile s | note |",
            "|---|---|---|---|---|---|---|---|",
            *(_row(name, models[name]) for name in sorted(models)),
            "",
        ]
    return "\n".join(parts)


def _row(name: str, record: Record) -> str:
    if record.error is None or record.flops is None or record.parameters is None:
        cells = [name, record.verdict, "", "", "", "", "", record.note.replace("|", "\\|")]
    else:
        cells = [
            name, record.verdict, f"{record.error:.0e}", f"{100 * record.flops:.1f}",
            f"{100 * record.parameters:.1f}", str(record.fallbacks), f"{record.seconds:.1f}",
            record.note,
        ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _installed(entry: Entry) -> bool:
    try:
        importlib.metadata.version(entry.package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Run the named models, or all that are installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="PACKAGE or PACKAGE/MODEL; all if none is named")
    parser.add_argument("--write", action="store_true", help="keep the results, render the page")
    parser.add_argument("--eager", action="store_true", help="only build and run the models")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_without_kernels()
    for entry in entries():
        if arguments.names and not {entry.package, f"{entry.package}/{entry.name}"} & {
            *arguments.names
        }:
            continue
        if not _installed(entry):
            print(f"{entry.package}/{entry.name}: skipped, not installed", flush=True)
            continue
        try:
            if arguments.eager:
                model, inputs, mode = prepared(entry)
                outcome: Any = f"{float(model(**inputs)):.6g} {mode}"
            else:
                outcome = run(entry)
        except NotSmallError as error:
            outcome = f"skipped, no small sizes: {error}"
        print(f"{entry.package}/{entry.name}: {outcome}", flush=True)
        if arguments.write and isinstance(outcome, Record):
            _write(entry, outcome)


def _write(entry: Entry, record: Record) -> None:
    records = load()
    records.setdefault(entry.package, {})[entry.name] = record
    kept = {
        package: {name: asdict(one) for name, one in models.items()}
        for package, models in records.items()
    }
    RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(records), encoding="utf-8")


if __name__ == "__main__":
    main()
