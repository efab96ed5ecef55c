"""Does a compiled model compute what the model does? Answered pass by pass, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, PassError, SPCompilerError
from sp_compiler.base.units import parse_bytes
from sp_compiler.compiler import compile_program, to_program
from sp_compiler.estimate import ExampleInputs, checked_inputs
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward, RegionCode
from sp_compiler.ir.hints import Hint
from sp_compiler.ir.op_traits import draws
from sp_compiler.options import CompileOptions, Dropout, Outputs
from sp_compiler.trace.environment import without_cache
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.blocks import check_blocks
from sp_compiler.verification.interpret import PartitionedCode, ShardedCode
from sp_compiler.verification.reference import ReferenceResult, run_captured, run_program
from sp_compiler.verification.report import (
    Comparison,
    VerifyReport,
    gradient_errors,
    output_errors,
)
from sp_compiler.verification.simulate import simulate_step

TOLERANCE = 1e-10
EAGER_TOLERANCE = 1e-6
"""The model may round to float32 inside, by kernels that differ."""

_SEED = 1234567


def verify(
    model: nn.Module,
    example_inputs: ExampleInputs,
    tp: int = 2,
    *,
    sequence_parallel: bool = True,
    recompute: str = "selective",
    memory_budget: int | str | None = None,
    dropout: Dropout = "regenerate",
    outputs: Outputs = "auto",
    nominal_tokens: int = 8192,
    hints: Mapping[str, Hint] | None = None,
) -> VerifyReport:
    """Compare a compiled ``model`` with itself on one device: outputs and every gradient.

    Works on a float64 copy, whose casts to lower types are lifted on both sides, on ranks simulated
    in this process: no process group is needed or touched. The result of each pass is compared, to
    find the one that broke; then each distinct block, forward and backward, on random data, which
    also shows what no loss shows (a gradient that differs between ranks). Dropouts draw the same
    masks on both sides; against the model itself they are switched off.

    >>> print(sp_compiler.verify(model, ((), {"input_ids": ids, "labels": ids}), tp=4))

    Args:
        model: with real parameters, in the mode (train or eval) to verify; is left as it is.
        example_inputs: (args, kwargs).
        tp: number of simulated ranks.
        memory_budget: of ``model`` as it is; the float64 copy gets as much more as it is larger.

    The other options are those of :func:`sp_compiler.compile`.

    Raises:
        ArgumentError: an argument outside what is allowed, parameters on the ``meta`` device.
        UnsupportedError: an option of a later version, or hooks inside the model.
        CaptureError: the model has control flow that depends on data.
    """
    args, kwargs = checked_inputs(model, example_inputs)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            "model: its parameters are on the meta device and have no values to compare; "
            "build a smaller model on a real device, or use sp_compiler.plan"
        )
    options = CompileOptions(
        tp=tp,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        memory_budget=_in_float64(model, memory_budget),
        dropout=dropout,
        outputs=outputs,
        nominal_tokens=nominal_tokens,
        hints={} if hints is None else hints,
    )
    asked = kwargs.get("use_cache") is True
    if asked:
        kwargs = {**kwargs, "use_cache": False}
    step = _Step.of(copy.deepcopy(model).double(), args, kwargs)
    with without_cache(step.model, asked=asked):
        rows = [*_before_sharding(step, options), *_after_sharding(step, options)]
    return VerifyReport(type(model).__name__, tp, tuple(rows))


def _in_float64(model: nn.Module, memory_budget: int | str | None) -> int | None:
    if memory_budget is None:
        return None
    sizes = [p.element_size() for p in model.parameters() if p.is_floating_point()]
    return parse_bytes("memory_budget", memory_budget) * 8 // min(sizes, default=8)


@dataclass(frozen=True)
class _Step:
    """A float64 model with the inputs of one forward."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: list[Any]

    @classmethod
    def of(cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Step:
        leaves, spec = flatten_inputs(args, kwargs)
        inputs = [_double(leaf) for leaf in leaves]
        mine, named = pytree.tree_unflatten(inputs, spec)
        return cls(model, tuple(mine), named, inputs)

    def capture(self, *, lifted: bool) -> Captured:
        return capture(self.model, self.args, self.kwargs, lift_casts=lifted)

    @property
    def params(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    @property
    def buffers(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.named_buffers()}

    def quiet(self) -> _Step:
        """In eval mode, so that nothing is random."""
        return replace(self, model=copy.deepcopy(self.model).eval())


@dataclass(frozen=True)
class _Numbers:
    """What one step computed."""

    outputs: list[Any]
    grads: dict[str, Tensor | None]


def _double(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    value = leaf.detach().clone()
    value = value.double() if value.is_floating_point() else value
    return value.requires_grad_(leaf.requires_grad)


# Passes before the model is sharded: on one device.


def _before_sharding(step: _Step, options: CompileOptions) -> Iterator[Comparison]:
    unlifted = step.capture(lifted=False)
    if _draws(unlifted):
        step = step.quiet()
        unlifted = step.capture(lifted=False)
    params, buffers, inputs = step.params, step.buffers, step.inputs
    eager = _numbers(step, lambda: _leaves(step))
    found = _numbers(step, lambda: run_captured(unlifted, params, buffers, inputs).outputs)
    yield _compared("capture", found, eager, EAGER_TOLERANCE)

    lifted = step.capture(lifted=True)
    true = _numbers(step, lambda: run_captured(lifted, params, buffers, inputs).outputs)
    program = to_program(lifted, options)
    found = _numbers(step, lambda: run_captured(lifted, params, buffers, inputs).outputs)
    yield _compared("normalize", found, true)
    found = _numbers(step, lambda: run_program(program, params, buffers, inputs).outputs)
    yield _compared("outline", found, true)


def _draws(captured: Captured) -> bool:
    return any(map(draws, captured.module.graph.nodes))


def _leaves(step: _Step) -> list[Any]:
    model = copy.deepcopy(step.model)  # its buffers may be written
    tensors = {**dict(model.named_buffers()), **step.params}
    outputs = torch.func.functional_call(model, tensors, step.args, dict(step.kwargs))
    return pytree.tree_leaves(outputs)


def _numbers(step: _Step, run: Callable[[], Sequence[Any]]) -> _Numbers:
    """Outputs and gradients of one step; the gradients are taken off the tensors again."""
    outputs = list(run())
    _backward(outputs)
    tensors = {**step.params, **_named_inputs(step.inputs)}
    grads = {name: tensor.grad for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.grad = None
    detached = [item.detach() if isinstance(item, Tensor) else item for item in outputs]
    return _Numbers(detached, grads)


def _named_inputs(inputs: Sequence[Any]) -> dict[str, Tensor]:
    return {
        f"input {index}": value
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.requires_grad
    }


def _backward(outputs: Sequence[Any]) -> None:
    """From the first output that is a number, else from all with ones, as on simulated ranks."""
    roots = [item for item in outputs if isinstance(item, Tensor) and item.requires_grad]
    roots = [item for item in roots if item.dim() == 0][:1] or roots
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


# Passes from sharding on: on simulated ranks.


def _after_sharding(step: _Step, options: CompileOptions) -> Iterator[Comparison]:
    program = to_program(step.capture(lifted=True), options)
    reference: list[ReferenceResult] = []

    def run() -> list[Any]:
        result = run_program(program, step.params, step.buffers, step.inputs, torch.tensor(_SEED))
        reference.append(result)
        return result.outputs

    true = _numbers(step, run)
    try:
        compiled = compile_program(program, options)
    except PassError as error:
        if error.pass_name != "check":
            yield _failed(error.pass_name, "model", error)
            return
        yield _failed("check", "model", error)
        compiled = compile_program(program, options, checked=False)
    variants = _variants(compiled)
    for stage, variant in variants.items():
        yield _simulated(stage, variant, step, true)
    yield from check_blocks(program, variants, reference[0].call_inputs, TOLERANCE)


def _variants(compiled: CompiledProgram) -> dict[str, CompiledProgram]:
    """The program as each pass left it, by the pass: only how its regions are run differs."""
    regions = compiled.regions.values()
    sharded: dict[str, RegionCode] = {
        item.region.name: ShardedCode(item.region, item.differentiable) for item in regions
    }
    split = {item.region.name: PartitionedCode(item.partitioned) for item in regions}
    from_loss = {
        name: LossBackward(loss.output, split[name].loss_backward)
        for name, loss in compiled.loss_backwards.items()
    }
    return {
        "shard": replace(compiled, codes=sharded, loss_backwards={}),
        "partition": replace(compiled, codes=dict(split), loss_backwards=from_loss),
        "codegen": compiled,
    }


def _simulated(stage: str, compiled: CompiledProgram, step: _Step, true: _Numbers) -> Comparison:
    seed = torch.tensor(_SEED)
    try:
        result = simulate_step(compiled, step.params, step.buffers, step.inputs, seed)
    except (SPCompilerError, RuntimeError) as error:
        return _failed(stage, "model", error)
    grads = {name: result.grads.get(name) for name in step.params}
    grads |= {f"input {index}": grad for index, grad in enumerate(result.input_grads)}
    return _compared(stage, _Numbers(result.outputs, grads), true)


def _compared(
    stage: str, found: _Numbers, true: _Numbers, tolerance: float = TOLERANCE
) -> Comparison:
    errors = {
        **output_errors(found.outputs, true.outputs),
        **{f"gradient of {n}": e for n, e in gradient_errors(found.grads, true.grads).items()},
    }
    where = max(errors, key=errors.__getitem__, default="")
    return Comparison(stage, "model", errors.get(where, 0.0), tolerance, where)


def _failed(stage: str, subject: str, error: Exception) -> Comparison:
    return Comparison(stage, subject, float("inf"), TOLERANCE, message=str(error))
