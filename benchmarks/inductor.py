"""The numbers of ``backend="inductor"`` against those of eager code, for every architecture.

    python -m benchmarks.inductor [--tp 1 2 4] [--missing] [--seconds 500] [--write] [names ...]
    TRITON_INTERPRET=1 python -m benchmarks.inductor --emitted ...

One step of each architecture of the tests, float32, training mode with dropout, on simulated ranks.
With ``--write`` each result is stored in ``benchmarks/results/inductor.json`` at once, and all of
them are written to ``docs/inductor.md``; ``--missing`` continues an interrupted run, and no new
measurement starts after ``--seconds``. Kernels are kept in Inductor's own cache.
With ``--emitted`` the kernels are not C++ but the Triton code that Inductor emits for a GPU,
interpreted; the results go to ``benchmarks/results/inductor_emitted.json``. With ``--device cuda``
the GPU runs it; the results go to ``benchmarks/results/inductor_gpu.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch._inductor import config

from benchmarks import interpreted_triton
from benchmarks.performance import RESULTS, keep_architecture, markdown_table
from sp_compiler.inductor import lowering
from sp_compiler.inductor.fused import Fused
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ops.communicator import Communicator
from tests.helpers import parity
from tests.models import architectures

FILE = RESULTS / "inductor.json"
EMITTED = RESULTS / "inductor_emitted.json"
ON_GPU = RESULTS / "inductor_gpu.json"
KERNELS = RESULTS / "inductor_kernels.json"
PAGE = Path(__file__).parents[1] / "docs" / "inductor.md"
RANKS = (1, 2, 4)
DROPOUT = 0.1
TOLERANCE = 2e-6
Grads = Mapping[str, Tensor | None]
_INFINITE = 1e30
_DRAWS = frozenset({"dropout", "dropout_mask"})
_ERRORS = ("loss_error", "gradient_error", "eager_error", "inductor_error", "function_error")
_COUNTS = ("masked", "masks_differ", "functions")
_HEAD = """# Accuracy of Inductor

Written by `python -m benchmarks.inductor --write` from real runs; not edited by hand.

Does `backend="inductor"` compute the same as `backend="eager"`? One training step of each
architecture of the [coverage](coverage.md) page in its *dividing* size, in float32 with every
dropout probability set to 0.1, on 1, 2 and 4 simulated ranks.

- *loss*, *gradients*: the largest difference between the two backends, relative to the loss and to
  the largest gradient of all parameters.
- *eager*, *Inductor*: the error of each backend's gradients against the model on one device in
  float64. A model that amplifies rounding has a large error in both.
- *function*: the largest difference between any compiled function and its own source text on the
  same tensors, relative to the largest value that it reads or returns.
- *masks*, *differ*: elements compared in the results of functions that draw dropout masks, and
  those that are zero under one backend only, and not for rounding.
- *functions*, *as written*: functions that Inductor compiled, and those that run uncompiled.

Several values in a cell belong to the ranks in the second column.
"""
_ON_GPU = """## On a GPU

The same on a GPU, which runs the Triton code itself; both sides are on the GPU. Written by
`python -m benchmarks.inductor --device cuda --write`.
"""
_EMITTED = """## Code for a GPU, interpreted

The same for the Triton code that Inductor emits for a GPU, without a GPU: Triton interprets each
kernel with NumPy, and PyTorch computes the matmuls. Written by
`TRITON_INTERPRET=1 python -m benchmarks.inductor --emitted --write`.
"""
_KERNELS = """## Kernels on a GPU

What Inductor emits for a block of the paper's 22B GPT on one of 8 GPUs, bfloat16, 4 x 2048 tokens,
counted in the text of its Triton code by `python -m benchmarks.inductor_kernels --write`. Nothing
ran, and no GPU is needed.

- *products*: cuBLAS kernels; attention is computed in chunks of queries.
- *passes*: Inductor's own kernels; *small*: those that access less than a MiB, such as hashes
  of rows and seeds, or sums of partial sums.
- *MiB*: bytes that all of them read and write, each buffer once per kernel.
- *read once*: the same, if all passes of a function between the same matmuls were one kernel.
- *again*: bytes that a pass reads in a second loop over the row that it has just reduced, which is
  then in a cache; not included in *MiB*.
"""


@dataclass(frozen=True)
class Record:
    """One architecture on some ranks; errors and counts as on the page."""

    loss_error: float
    gradient_error: float
    eager_error: float
    inductor_error: float
    function_error: float
    masked: int
    masks_differ: int
    functions: int
    as_written: tuple[str, ...]

    @property
    def passes(self) -> bool:
        """Return whether the results agree with eager code, up to float32 rounding.

        A model may amplify rounding: if eager code is farther than the tolerance from float64,
        the two may differ from each other by as much.
        """
        allowed = max(TOLERANCE, 2 * self.eager_error)
        within = self.loss_error <= TOLERANCE and self.gradient_error <= allowed
        return within and not self.masks_differ


def case(name: str, device: str = "cpu") -> tuple[parity.Case, Grads]:
    """``name`` captured in float32, in training mode, with dropout; and its float64 gradients."""
    size = replace(architectures.size("dividing", max(RANKS)), dropout=DROPOUT)
    model = architectures.build(name, size).float().to(device)
    inputs = architectures.inputs(name, size)
    seed = parity.SEED.to(device)
    floats = _cast(inputs, torch.float32, device)
    found = parity.make_case(model, floats, lift_casts=False, seed=seed)
    with architectures.float64():
        exact = parity.make_case(model.double(), _cast(inputs, torch.float64, device), seed=seed)
    return found, exact.grads


def _cast(inputs: Mapping[str, Any], dtype: torch.dtype, device: str) -> dict[str, Any]:
    return {
        key: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for key, value in inputs.items()
    }


def measure(found: parity.Case, exact: Grads, tp: int, device: str = "cpu") -> Record:
    """One step of both backends on ``tp`` ranks."""
    seed = parity.SEED.to(device)
    expected = parity.simulate(found, parity.compiled(found, tp=tp), seed)
    program = parity.compiled(found, tp=tp, backend="inductor")
    with _Functions().compared(tp) as functions:
        step = parity.simulate(found, program, seed)
    compiled = list(_fused(program))
    return Record(
        _error(step.outputs[:1], expected.outputs[:1]),
        _gradient_error(step.grads, expected.grads),
        _gradient_error(expected.grads, exact),
        _gradient_error(step.grads, exact),
        functions.error,
        functions.masked,
        functions.masks_differ,
        sum(not each.reason for each in compiled),
        tuple(f"{each.name}: {each.reason}" for each in compiled if each.reason),
    )


class _Functions:
    """Compiled functions compared with their own source text, call by call.

    A whole step would not show which function differs, nor a wrong mask that hardly affects it.
    """

    def __init__(self) -> None:
        self.error = 0.0
        self.masked = self.masks_differ = 0

    @contextlib.contextmanager
    def compared(self, world_size: int) -> Iterator[_Functions]:
        """Compare every call of one while this is entered."""
        run = Fused._run

        def both(fused: Fused, rank: int, arguments: Sequence[Any]) -> Sequence[Any]:
            results = run(fused, rank, arguments)
            # Copies, because a reader of the results may change a view of an argument.
            expected = fused._function(Communicator(None, rank, world_size), *arguments)
            several = expected if isinstance(expected, tuple) else (expected,)
            draws = not _DRAWS.isdisjoint(fused._function.__code__.co_names)
            scale = max(map(_largest, (*arguments, *several)))
            for result, true in zip(results, several, strict=True):
                self._compare(result, true, draws, scale)
            return results

        with mock.patch.object(Fused, "_run", both):
            yield self

    def _compare(self, result: Any, true: Any, draws: bool, scale: float) -> None:
        if not isinstance(true, Tensor):
            return
        # Not of the result alone: of a sum that is zero but for rounding it would be all.
        self.error = max(self.error, _difference(result, true) / (scale or 1))
        # A tenth is dropped: where fewer are zero they are so by chance, or by rounding.
        zeros = true == 0
        if draws and zeros.float().mean() > DROPOUT / 2:
            self.masked += zeros.numel()
            # Rounding makes a zero of a sum, too, or of a zero what is as small.
            rounding = torch.finfo(torch.float32).eps * scale
            far = (result.double() - true.double()).abs() > rounding
            self.masks_differ += int((((result == 0) != zeros) & far).sum())


def _error(results: Any, expected: Any) -> float:
    """The largest difference relative to the largest value; infinite if only one has values."""
    pairs = list(zip(results, expected, strict=True))
    if any((result is None) is not (true is None) for result, true in pairs):
        return float("inf")
    tensors = [pair for pair in pairs if isinstance(pair[1], Tensor)]
    worst = max((_difference(*pair) for pair in tensors), default=0.0)
    return worst / (max((_largest(true) for _, true in tensors), default=0.0) or 1.0)


def _difference(result: Tensor, true: Tensor) -> float:
    """The largest difference between two elements; infinite if only one of them is finite."""
    result, true = result.detach().double(), true.detach().double()
    # Equal infinities, of a mask that is added, have no difference.
    difference = (result - true).abs().masked_fill(result == true, 0)
    return float(difference.nan_to_num(float("inf"), float("inf")).amax()) if true.numel() else 0.0


def _largest(value: Any) -> float:
    """The largest floating-point value, ignoring values that represent infinity in a mask."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    size = value.detach().abs()
    return float(size.masked_fill(~(size < _INFINITE), 0).max())


def _gradient_error(grads: Grads, expected: Grads) -> float:
    names = [name for name in expected if name in grads]
    return _error([grads[name] for name in names], [expected[name] for name in names])


def _fused(program: CompiledProgram) -> Iterator[Fused]:
    for code in program.codes.values():
        for function in vars(code).values():
            if isinstance(function, staticmethod) and isinstance(function.__func__, Fused):
                yield function.__func__


def page(results: Mapping[str, Any]) -> str:
    """The text of ``docs/inductor.md``."""
    parts = [_HEAD, *_results(results)]
    for head, file in ((_EMITTED, EMITTED), (_ON_GPU, ON_GPU)):
        if file.exists():
            parts += [head, *_results(json.loads(file.read_text()))]
    return "\n".join([*parts, _KERNELS, _kernel_table(json.loads(KERNELS.read_text()))])


def _page_of_files(_: Mapping[str, Any]) -> str:
    """The page, which shows both files, whichever was written to."""
    return page(json.loads(FILE.read_text()))


def _results(results: Mapping[str, Any]) -> list[str]:
    """The paragraphs of a file of results."""
    rows, reasons, apart = [], [], []
    for name in architectures.names():
        records = results["architectures"].get(name, {})
        found = [records[ranks] for ranks in sorted(records, key=int)]
        if found:
            rows.append(
                (
                    name,
                    ", ".join(sorted(records, key=int)),
                    *(", ".join(f"{each[key]:.0e}" for each in found) for key in _ERRORS),
                    *(", ".join(str(each[key]) for each in found) for key in _COUNTS),
                    ", ".join(str(len(each["as_written"])) for each in found),
                )
            )
        apart += [
            f"{name} on {ranks} (eager code {each['eager_error']:.0e} from float64, Inductor "
            f"{each['inductor_error']:.0e})"
            for ranks, each in sorted(records.items())
            if each["gradient_error"] > TOLERANCE
        ]
        reasons += [f"- {name}: {text}" for text in {t: 0 for r in found for t in r["as_written"]}]
    head = (
        "architecture", "ranks", "loss", "gradients", "eager", "Inductor", "function", "masks",
        "differ", "functions", "as written",
    )  # fmt: skip
    parts = [f"On {results['machine']}.\n", markdown_table(head, rows)]
    if apart:
        parts += [f"Gradients more than {TOLERANCE:.0e} apart: {', '.join(apart)}.\n"]
    missing = [name for name in architectures.names() if name not in results["architectures"]]
    if missing:
        parts += [f"Not measured yet: {', '.join(missing)}.\n"]
    if reasons:
        parts += ["What runs uncompiled, and why:\n", *reasons, ""]
    return parts


def _kernel_table(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "recompute", "dropout", "direction", "products", "passes", "small", "MiB", "read once",
        "ratio", "again",
    )  # fmt: skip
    return markdown_table(
        head,
        [
            (
                *(str(row[key]) for key in ("recompute", "dropout", "direction")),
                *(str(row[key]) for key in ("products", "passes", "small")),
                *(f"{row[key] / 2**20:.0f}" for key in ("bytes", "once")),
                f"{row['bytes'] / row['once']:.3f}",
                f"{row['again'] / 2**20:.0f}",
            )
            for row in rows
        ],
    )


def main() -> None:
    """Measure the named architectures, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--tp", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--missing", action="store_true", help="only what no result is kept of")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    parser.add_argument("--device", default="cpu", help='where to run: "cpu" or "cuda"')
    parser.add_argument("--emitted", action="store_true", help="interpret the code for a GPU")
    options = parser.parse_args()
    # Triton reads the variable when it is imported, which has already happened.
    if options.emitted and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--emitted: set TRITON_INTERPRET=1 in the environment")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    file = EMITTED if options.emitted else ON_GPU if options.device != "cpu" else FILE
    compiler = interpreted_triton if options.emitted else lowering
    for name in options.names or architectures.names():
        kept = json.loads(file.read_text())["architectures"] if file.exists() else {}
        done = kept.get(name, {}) if options.missing else {}
        missing = [tp for tp in options.tp if str(tp) not in done]
        if not missing or time.monotonic() > end:
            continue
        found, exact = case(name, options.device)
        for tp in missing:
            if time.monotonic() > end:
                return
            # More threads would compile kernels ahead of others that need the cores.
            used = mock.patch("sp_compiler.inductor.fused.compile_graph", compiler.compile_graph)
            with config.patch(compile_threads=1), used:
                record = measure(found, exact, tp, options.device)
            if options.write:
                keep_architecture(file, PAGE, _page_of_files, name, tp, asdict(record))
            print("ok  " if record.passes else "FAIL", name, tp, asdict(record), flush=True)


if __name__ == "__main__":
    main()
