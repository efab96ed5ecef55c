"""Does a compiled model compute what the model does? Answered pass by pass, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, PassError, SPCompilerError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.units import parse_bytes
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram, LossBackward, RegionCode
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.ir.op_traits import draws
from sp_compiler.ir.program import Program
from sp_compiler.options import (
    CompileOptions,
    ExampleInputs,
    Options,
    checked_inputs,
    with_options,
)
from sp_compiler.pass_manager.runner import PassRunner
from sp_compiler.passes.memory.partition import partition
from sp_compiler.passes.normalize.random_numbers import draw_by_counter
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


@with_options
def verify(
    model: nn.Module, example_inputs: ExampleInputs, tp: int = 2, **options: Unpack[Options]
) -> VerifyReport:
    """Compare a compiled ``model`` with itself on one device: outputs and every gradient.

    Works on a float64 copy, whose casts to lower types are lifted on both sides, on ranks simulated
    in this process: no process group is needed or touched. The result of each pass is compared, to
    find the one that broke, your own among them; then each distinct block, forward and backward, on
    random data, which also shows what no loss shows (a gradient that differs between ranks).
    Random numbers are the same on both sides; against the model itself dropouts are switched off.

    >>> print(sp_compiler.verify(model, ((), {"input_ids": ids, "labels": ids}), tp=4))

    Args:
        model: with real parameters, in the mode (train or eval) to verify; is left as it is. A
            ``memory_budget`` is that of ``model`` as it is; the float64 copy gets as much more as
            it is larger.
        example_inputs: (args, kwargs).
        tp: number of simulated ranks.

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
    budget = _in_float64(model, options.get("memory_budget"))
    checked = CompileOptions.of(tp, {**options, "memory_budget": budget})
    asked = kwargs.get("use_cache") is True
    if asked:
        kwargs = {**kwargs, "use_cache": False}
    step = _Step.of(copy.deepcopy(model).double(), args, kwargs)
    run = PassRunner()
    with without_cache(step.model, asked=asked):
        rows = _before_sharding(step, checked)
        if not any(row.message for row in rows):  # else there is no program to shard
            rows += _after_sharding(step, checked, run)
    return VerifyReport(type(model).__name__, tp, tuple(rows), tuple(run.reports))


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


def _before_sharding(step: _Step, options: CompileOptions) -> list[Comparison]:
    unlifted = step.capture(lifted=False)
    if _draws(unlifted):
        step = step.quiet()
        unlifted = step.capture(lifted=False)
    tensors = step.params, step.buffers, step.inputs
    with torch.random.fork_rng():
        torch.manual_seed(0)  # what draws in eval mode too draws the same on both sides
        eager = _numbers(step, lambda: _leaves(step))
        torch.manual_seed(0)
        exported = _numbers(step, lambda: run_captured(unlifted, *tensors).outputs)
    rows = [_compared(Pass.EXPORT, exported, eager, EAGER_TOLERANCE)]

    lifted, reference = step.capture(lifted=True), step.capture(lifted=True)
    is_random = _draws(lifted)
    # Later passes have the numbers of the counter, which torch's generator does not have.
    draw_by_counter(reference, stored=False)
    seed = torch.zeros((), dtype=torch.int64)
    true = _numbers(step, lambda: run_captured(reference, *tensors, seed).outputs)

    def compare(name: str, left: Captured | Program) -> None:
        def run() -> list[Any]:
            if isinstance(left, Program):
                return run_program(left, *tensors).outputs
            return run_captured(left, *tensors, seed).outputs

        # Each call of a program has a seed of its own: its numbers are others than the capture's.
        if not (is_random and isinstance(left, Program)):
            rows.append(_compared(name, _numbers(step, run), true))

    try:
        to_program(lifted, options, PassRunner(observer=compare))
    except PassError as error:
        rows.append(_failed(error.pass_name, "model", error))
    return rows


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


def _after_sharding(step: _Step, options: CompileOptions, run: PassRunner) -> Iterator[Comparison]:
    captured = run.once(Pass.EXPORT, capture, step.model, step.args, step.kwargs, lift_casts=True)
    program = to_program(captured, options, run)
    reference: list[ReferenceResult] = []

    def run_reference() -> list[Any]:
        seed = torch.tensor(_SEED)
        result = run_program(program, step.params, step.buffers, step.inputs, seed)
        reference.append(result)
        return result.outputs

    true = _numbers(step, run_reference)
    try:
        compiled = Compilation(program, options, run=run).finish(options)
    except PassError as error:
        yield _failed(error.pass_name, "model", error)
        if error.pass_name != Pass.CHECK:
            return
        run.forget_from(Pass.SHARD)  # with the operators that run replicated for the error
        compiled = Compilation(program, options, checked=False, run=run).finish(options)
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
    variants: dict[str, CompiledProgram] = {
        Pass.SHARD: replace(compiled, codes=sharded, loss_backwards={})
    }
    if Pass.OVERLAP in compiled.stages:
        losses = {name: loss.output for name, loss in compiled.loss_backwards.items()}
        parts = [partition(item.joint, losses.get(item.region.name)) for item in regions]
        variants[Pass.PARTITION] = _split(compiled, parts)
    last = Pass.OVERLAP if Pass.OVERLAP in compiled.stages else Pass.PARTITION
    variants[last] = _split(compiled, [item.partitioned for item in regions])
    return {**variants, Pass.CODEGEN: compiled}


def _split(compiled: CompiledProgram, parts: Sequence[Partitioned]) -> CompiledProgram:
    """The program run by these forwards and backwards, one for each of its regions."""
    codes = dict(zip(compiled.regions, map(PartitionedCode, parts), strict=True))
    from_loss = {
        name: LossBackward(loss.output, codes[name].loss_backward)
        for name, loss in compiled.loss_backwards.items()
    }
    return replace(compiled, codes=dict(codes), loss_backwards=from_loss)


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
