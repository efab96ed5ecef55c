"""``torch.compile(model, backend="sp_compiler")`` for HuggingFace models, against eager code.

    python -m benchmarks.backend [--tp 1 2 4] [--missing] [--seconds 500] [--write] [names ...]

Float64, training mode without dropout; two ranks are gloo processes, four are simulated. With
``--write`` each result is stored in ``benchmarks/results/backend.json`` at once, and all of them
are written to ``docs/backend.md``; ``--missing`` continues an interrupted run, and no new
measurement starts after ``--seconds``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

import sp_compiler
from benchmarks.performance import RESULTS, keep_architecture, markdown_table
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.runtime.recorder import Recorder
from sp_compiler.torch_compile import compiled_graph
from sp_compiler.torch_compile.backend import sp_compiler_backend
from sp_compiler.torch_compile.dynamo_graph import DynamoGraph
from sp_compiler.torch_compile.full_parameters import local_parameters
from sp_compiler.verification.judge import backward
from sp_compiler.verification.simulate import simulate_step
from tests.helpers import parity
from tests.helpers.ranks import run_on_ranks
from tests.models import architectures, zoo

FILE = RESULTS / "backend.json"
PAGE = Path(__file__).parents[1] / "docs" / "backend.md"
NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3", "gpt2", "gpt_neox",
    "gptj", "opt", "bloom", "falcon", "mixtral", "bert", "roberta", "deberta_v2", "t5", "vit",
)  # fmt: skip
RANKS = (1, 2, 4)
SIMULATED = 4
TOLERANCE = 1e-9
STEPS = 3  # after the second one, none may compile
_HEAD = f"""# torch.compile with this backend

Written by `python -m benchmarks.backend --write` from real runs; not edited by hand.

Does `torch.compile(model, backend="sp_compiler")` compute the gradients of the model, and save the
bytes that `sp_compiler.compile(model, outputs="replicate")` saves? {len(NAMES)} HuggingFace
architectures of the [coverage](coverage.md) page, in float64, without dropout: on one rank, on two
processes (gloo), and the graph that Dynamo captured on {SIMULATED} simulated ranks.

- *gradients*: the largest error of any parameter's gradient against the same graph run by eager
  operators, where {TOLERANCE:.0e} is allowed. In both graphs the model's own casts to float32 are
  casts to float64, because they round off more than that.
- *as written*: the same against the model itself, not compiled, with its casts to float32.
- *eager*, *backend*, *compile*: bytes alive between forward and backward, per rank, without
  parameters, buffers, inputs and outputs; for simulated ranks, those of the plans. Mixtral's eager
  experts are Transformers' `batched_mm`, because `grouped_mm` does not support float64.
- *copies*: with the backend every rank has the full parameters and computes with views of its part
  of them. For fused and padded parameters the parts are copies, made in every forward.
- *graphs*: the number that Dynamo found; *recompiled*: those compiled after the second step.

Each model is called once before `torch.compile`. Otherwise Mixtral and ViT would be two graphs,
because Transformers installs hooks in the first call, under a lock at which Dynamo breaks the
graph. Dynamo also breaks the graph if a model logs in every call, as GPT-2 does about
`loss_type=None`; `TORCH_LOGS=graph_breaks` shows the lines.
"""


@dataclass(frozen=True)
class Record:
    """One architecture on some ranks; errors and bytes as on the page.

    Simulated ranks only run the captured graph, once: fields that this does not determine are
    ``None``.
    """

    gradient_error: float
    as_written_error: float | None
    eager_bytes: int | None
    backend_bytes: int
    copied_bytes: int | None
    compile_bytes: int
    graphs: int
    recompiled: int | None

    @property
    def passes(self) -> bool:
        """Whether gradients and saved bytes are right and nothing was recompiled."""
        # One graph saves what compile saves. Several are recomputed and sharded each on its own.
        no_more_bytes = self.backend_bytes <= self.compile_bytes or self.graphs > 1
        return self.gradient_error <= TOLERANCE and no_more_bytes and not self.recompiled

    @property
    def saves_fewer(self) -> bool:
        """Whether the one graph that Dynamo found saves less than the one of ``torch.export``."""
        return self.graphs == 1 and self.backend_bytes < self.compile_bytes


def measure(name: str, tp: int) -> Record:
    """Run steps of ``name`` in all ways on the ranks of this process group, or on simulated ones.

    Every rank returns the same record, or an assertion fails.
    """
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    size = architectures.size("dividing", max(RANKS))
    with architectures.float64():
        model, inputs = architectures.build(name, size), architectures.inputs(name, size)
        _run_eagerly(model, inputs)
        if tp == SIMULATED:
            return _simulated(model, inputs, tp)
        eager, lifted, lifted_eager, taken_over = (copy.deepcopy(model) for _ in range(4))
        _reset_dynamo()
        backend = _Recording()
        compiled = torch.compile(model, backend=backend, options={"tp": tp})
        for _ in range(2):
            _step(model, compiled, inputs)
        graphs = counters["stats"]["unique_graphs"]
        backend_bytes, copied_bytes = backend.saved_bytes(model, inputs, compiled)
        for _ in range(STEPS):
            grads = _step(model, compiled, inputs)
        recompiled = counters["stats"]["unique_graphs"] - graphs

        _reset_dynamo()
        without_casts = _without_casts(sp_compiler_backend)
        ours = torch.compile(lifted, backend=without_casts, options={"tp": tp})
        lifted_grads = _step(lifted, ours, inputs)
        _reset_dynamo()
        plain = torch.compile(lifted_eager, backend=_without_casts(lambda graph, inputs: graph))
        error = parity.gradient_error(lifted_grads, _step(lifted_eager, plain, inputs))
        if _groups_experts(eager):
            eager.set_experts_implementation("batched_mm")

        module = sp_compiler.compile(taken_over, tp=tp, outputs="replicate")
        _step(module, module, inputs)
        return Record(
            error,
            parity.gradient_error(grads, _step(eager, eager, inputs)),
            _saved_by_call(eager, inputs),
            backend_bytes,
            copied_bytes,
            _saved_by_call(module, inputs),
            graphs,
            recompiled,
        )


def _run_eagerly(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Call ``model`` once, as the page says: Dynamo breaks the graph where Transformers installs
    hooks in the first call."""
    if not _groups_experts(model):
        model(**inputs)
        return
    model.set_experts_implementation("batched_mm")
    model.forward(**inputs)
    model.set_experts_implementation("grouped_mm")


def _groups_experts(model: nn.Module) -> TypeGuard[transformers.PreTrainedModel]:
    """Whether eager code needs other experts, because grouped matmuls do not support float64."""
    config = getattr(model, "config", None)
    return getattr(config, "_experts_implementation", "") == "grouped_mm"


def _simulated(model: nn.Module, inputs: dict[str, Any], tp: int) -> Record:
    """One step of the graphs that Dynamo captures."""
    options = CompileOptions.of(tp, {"outputs": "replicate"})
    errors: list[float] = []
    saved: list[int] = []

    def as_written(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = DynamoGraph.of(module, example_inputs)

        def run(*args: Any) -> Any:
            bound = graph.bind(args)
            program = build(graph.as_model(bound), bound.tensors, {}, options)
            saved.append(program.plan.activation_bytes)
            return module(*args)

        return run

    def lifted(module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = DynamoGraph.of(module, example_inputs)

        def run(*args: Any) -> Any:
            # Leaves: a graph after a break gets the results of the one before it.
            leaves = [_leaf(value) for value in args]
            bound = graph.bind(leaves)
            program = build(graph.as_model(bound), bound.tensors, {}, options)
            step = simulate_step(program, bound.params, bound.buffers, bound.tensors)
            backward(list(module(*leaves)), program.program.out_spec)
            expected = {name: value.grad for name, value in bound.params.items()}
            result = dict(step.grads)
            for index, value in enumerate(bound.tensors):
                if value.requires_grad:
                    expected[f"input {index}"] = value.grad
                    result[f"input {index}"] = step.input_grads[index]
            errors.append(parity.gradient_error(result, expected))
            return module(*args)

        return run

    copied = copy.deepcopy(model)
    plan = sp_compiler.plan(copied, ((), inputs), tp=tp, outputs="replicate")
    _reset_dynamo()
    torch.compile(model, backend=as_written)(**inputs)
    _reset_dynamo()
    torch.compile(model, backend=_without_casts(lifted))(**inputs)
    return Record(
        max(errors), None, None, sum(saved), None, plan.activation_bytes, len(saved), None
    )


class _Recording:
    """The backend, with a recorder of what its graphs allocate.

    Dynamo runs a frame as eager code while a dispatch mode is active, so it is entered inside.
    """

    def __init__(self) -> None:
        self._recorder = Recorder()

    def __call__(
        self, module: GraphModule, example_inputs: Sequence[Any], **settings: Any
    ) -> Callable[..., Any]:
        compiled = sp_compiler_backend(module, example_inputs, **settings)

        def run(*args: Any) -> Any:
            with self._recorder:
                return compiled(*args)

        return run

    def saved_bytes(
        self, model: nn.Module, inputs: dict[str, Any], call: Callable[..., Any]
    ) -> tuple[int, int]:
        """Return the bytes that a forward saves: activations, and copies of parameters' parts."""
        self._recorder = Recorder()
        parts: list[Tensor] = []

        def noted(*args: Any) -> dict[str, Tensor]:
            local = local_parameters(*args)
            parts.extend(local.values())
            return local

        with mock.patch.object(compiled_graph, "local_parameters", noted):
            output = call(**inputs)
        all_bytes = _saved_bytes(self._recorder, model, inputs, output)
        activation_bytes = _saved_bytes(self._recorder, model, inputs, (output, parts))
        return activation_bytes, all_bytes - activation_bytes


def _leaf(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach(), value.requires_grad)
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )


def _reset_dynamo() -> None:
    torch._dynamo.reset()
    counters.clear()


def _step(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The full gradients of one step."""
    model.zero_grad()
    zoo.loss_of(call(**inputs)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _saved_by_call(model: nn.Module, inputs: dict[str, Any]) -> int:
    with Recorder() as recorder:
        output = model(**inputs)
    return _saved_bytes(recorder, model, inputs, output)


def _saved_bytes(recorder: Recorder, model: nn.Module, inputs: dict[str, Any], output: Any) -> int:
    given = [leaf for leaf in tree_leaves((inputs, output)) if isinstance(leaf, Tensor)]
    return recorder.alive_bytes(excluding=[*model.parameters(), *model.buffers(), *given])


def _without_casts(backend: Callable[..., Any]) -> Callable[..., Any]:
    """``backend``, given graphs whose casts to float32 are casts to float64."""

    def lifted(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def call(module: GraphModule, example_inputs: Sequence[Any], **settings: Any) -> Any:
        for node in module.graph.nodes:
            node.args = torch.fx.node.map_aggregate(node.args, lifted)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, lifted)
            if node.op == "call_method" and node.target == "float":
                node.target = "double"
        module.recompile()
        return backend(module, example_inputs, **settings)

    return call


def page(results: Mapping[str, Any]) -> str:
    """The text of ``docs/backend.md``."""
    records = {
        (name, int(tp)): Record(**fields)
        for name in NAMES
        for tp, fields in sorted(results["architectures"].get(name, {}).items())
    }
    head = (
        "architecture", "ranks", "gradients", "as written", "eager", "backend", "compile",
        "copies", "graphs", "recompiled",
    )  # fmt: skip
    rows = [
        (
            name,
            str(tp),
            f"{each.gradient_error:.0e}",
            "" if each.as_written_error is None else f"{each.as_written_error:.0e}",
            "" if each.eager_bytes is None else f"{each.eager_bytes:,}",
            f"{each.backend_bytes:,}",
            f"{each.compile_bytes:,}",
            "" if each.copied_bytes is None else f"{each.copied_bytes:,}",
            str(each.graphs),
            "" if each.recompiled is None else str(each.recompiled),
        )
        for (name, tp), each in records.items()
    ]
    right = sum(each.passes for each in records.values())
    several = [
        f"{name} ({tp}) {each.backend_bytes / each.compile_bytes - 1:+.1%}"
        for (name, tp), each in records.items()
        if each.graphs > 1
    ]
    verdict = (
        f"{right} of {len(records)} runs have right gradients, save no more bytes than `compile` "
        "and compile nothing after the second step. If a graph break makes several graphs, saved "
        "tensors are chosen separately for each, and graphs pass full tensors to each other. Bytes "
        f"of all graphs together, relative to `compile`'s: {', '.join(several) or 'none'}."
    )
    if fewer := [f"{name} ({tp})" for (name, tp), each in records.items() if each.saves_fewer]:
        verdict += (
            f" Runs that save fewer bytes than `compile`: {', '.join(fewer)}. Transformers checks "
            "whether it is exported, and then makes masks for all layers before them, which are "
            "saved as inputs of the layers. For Dynamo each layer makes its own mask, which is "
            "recomputed."
        )
    absent = {name: [tp for tp in RANKS if (name, tp) not in records] for name in NAMES}
    missing = [f"{name} ({', '.join(map(str, tps))})" for name, tps in absent.items() if tps]
    if missing:
        verdict += f" Not measured yet: {', '.join(missing)}."
    about = f"On {results['machine']}."
    return "\n".join([_HEAD, f"{verdict} {about}\n", markdown_table(head, rows)])


def main() -> None:
    """Measure, print, and keep the results if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--tp", nargs="+", type=int, default=list(RANKS), choices=RANKS)
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--write", action="store_true", help="keep the results, tracked files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    end = time.monotonic() + options.seconds
    for name in options.names:
        kept = json.loads(FILE.read_text())["architectures"] if FILE.exists() else {}
        done = kept.get(name, {}) if options.missing else {}
        for tp in [tp for tp in options.tp if str(tp) not in done]:
            if time.monotonic() > end:
                return
            in_processes = 1 < tp < SIMULATED
            if in_processes:
                record, other = run_on_ranks(tp, measure, name, tp)
                assert asdict(record) == asdict(other), "ranks differ"
            else:
                record = measure(name, tp)
            print("ok  " if record.passes else "FAIL", name, tp, asdict(record), flush=True)
            if options.write:
                keep_architecture(FILE, PAGE, page, name, tp, asdict(record))


if __name__ == "__main__":
    main()
