"""Check that a compiled model computes the same as the original model, pass by pass."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError, PassError, UnsupportedError
from sp_compiler.base.pass_report import Pass
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.ir.captured import Captured
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import carries_gradient
from sp_compiler.ir.program import Program
from sp_compiler.options import CompileOptions, Options, with_options
from sp_compiler.pass_manager.runner import PassRunner
from sp_compiler.passes.normalize.random_numbers import draw_by_counter
from sp_compiler.passes.sharding.outputs import route_outputs
from sp_compiler.trace.arguments import ExampleInputs, checked_inputs, unordered_keywords
from sp_compiler.trace.environment import without_cache
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.blocks import BlockData, check_blocks
from sp_compiler.verification.judge import FLOAT64, Numbers, Precision, Reference, backward
from sp_compiler.verification.precision import KernelEps, NothingDropped
from sp_compiler.verification.reference import ReferenceResult, run_captured, run_program
from sp_compiler.verification.report import Comparison, VerifyReport
from sp_compiler.verification.sections import draws_uniform
from sp_compiler.verification.simulate import simulate_step
from sp_compiler.verification.variants import variants_by_pass

_SEED = 1234567
_NOT_ROUNDING = 1e-6
"""Relative difference of two runs in float64 that the order of sums cannot explain."""


@with_options
def verify(
    model: nn.Module, example_inputs: ExampleInputs, tp: int = 2, **options: Unpack[Options]
) -> VerifyReport:
    """Compare the compiled ``model`` with the original: outputs, buffers it writes, all gradients.

    Runs the compiled program on ranks simulated in this process, without a process group. Both
    sides compute in float64 and ignore casts (for Inductor, the code before its compilation runs);
    if an operator has no float64 kernel, both compute in the model's own dtypes. Next to each error
    the report shows the *noise floor*, the change of results by another order of rounding without
    ranks, and the rounding of the model's own dtypes. Only an error well above that floor is wrong.

    The result of each pass, including your own passes, is compared to find the one at fault. Then
    each distinct block is compared on random data, forward and backward, which also finds errors
    that no loss shows, such as a gradient that differs between ranks. Both sides draw the same
    random numbers; in the comparison with the model itself, dropout is off.

    >>> print(sp_compiler.verify(model, ((), {"input_ids": ids, "labels": ids}), tp=4))

    Args:
        model: with real parameters, in the mode (train or eval, autocast) to verify; it is not
            changed.
        example_inputs: (args, kwargs) of a call.
        tp: number of simulated ranks.

    Raises:
        ArgumentError: an argument is invalid, parameters are on the ``meta`` device, or the model
            returns no tensor or no finite value, cannot be copied, or is not deterministic.
        UnsupportedError: options that do not work together in this version, or hooks inside the
            model.
        CaptureError: the model has control flow that depends on parameters or activations.
    """
    args, kwargs = checked_inputs(model, example_inputs)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ArgumentError(
            "model: its parameters are on the meta device and have no values to compare; "
            "build a smaller model on a real device, or use sp_compiler.plan or "
            "sp_compiler.compile(..., verify=True)"
        )
    checked = CompileOptions.of(tp, options)
    asked = kwargs.get("use_cache")
    if asked is True:
        kwargs = {**kwargs, "use_cache": False}
    # A copy, since export writes attributes, and buffers that a forward changes would differ
    # between the two sides.
    step = Step.of(_copied(model), args, kwargs)
    # Passes before sharding run twice, first with an observer; this runner has the reports of the
    # second run.
    run = PassRunner()
    with without_cache(step.model, asked=asked):
        rows, precision = _before_sharding(step, checked)
        if not any(row.message for row in rows):  # else there is no program to shard
            rows += _after_sharding(step, checked, run)
    return VerifyReport(step.name, tp, tuple(rows), tuple(run.reports), precision.name)


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # its attributes may raise anything
        raise ArgumentError(
            f"model: verify runs a copy, and {_not_copied(model)} cannot be copied "
            f"({type(error).__name__}: {error}); keep it outside of the model, or give its class "
            "a __deepcopy__"
        ) from error


def _not_copied(model: nn.Module) -> str:
    """Return the first attribute of a module of ``model`` that cannot be copied, as text."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value)
            except Exception:  # this one
                return f"its attribute {f'{path}.{name}'.lstrip('.')!r}"
    return type(model).__name__


@dataclass(frozen=True)
class Tensors:
    """All tensors that one step reads, by name or position."""

    params: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Sequence[Any]

    def leaves(self, precision: Precision) -> Tensors:
        """Return copies as leaves with their own gradients."""
        params = {name: precision.leaf(value) for name, value in self.params.items()}
        buffers = {name: precision.leaf(value) for name, value in self.buffers.items()}
        return Tensors(params, buffers, list(map(precision.leaf, self.inputs)))

    def grads(self) -> dict[str, Tensor | None]:
        """Return gradients after backward, by name; those of inputs by position."""
        inputs = {
            f"input {index}": value
            for index, value in enumerate(self.inputs)
            if isinstance(value, Tensor) and value.requires_grad
        }
        return {name: value.grad for name, value in {**self.params, **inputs}.items()}


@dataclass(frozen=True)
class Step:
    """A model with the inputs of one forward."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    spec: pytree.TreeSpec
    tensors: Tensors
    open_dims: bool = False

    @classmethod
    def of(cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
        inputs, spec = flatten_inputs(args, kwargs, unordered_keywords(model.forward))
        tensors = Tensors(dict(model.named_parameters()), dict(model.named_buffers()), inputs)
        return cls(model, tuple(args), kwargs, spec, tensors)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def capture(self) -> Captured:
        return capture(self.model, self.args, self.kwargs, open_dims=self.open_dims)

    def numbers(
        self,
        run: Callable[[Tensors], ReferenceResult],
        precision: Precision,
        mode: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Numbers:
        """Return the results of ``run`` and their gradients, computed inside ``mode``."""
        tensors = self.tensors.leaves(precision)
        with precision.entered(), mode(), torch.random.fork_rng():
            torch.manual_seed(_SEED)  # draws from torch's generator are the same each time
            results = run(tensors)
            backward(results.outputs, results.out_spec)
        detached = [item.detach() if isinstance(item, Tensor) else item for item in results.outputs]
        written = {name: value.detach() for name, value in results.mutated_buffers.items()}
        return Numbers(detached, tensors.grads(), written)

    def run_eager(self, captured: Captured, tensors: Tensors) -> ReferenceResult:
        """Run the model; return its output's leaves, then the tensors that it stores according to
        ``captured``, and the buffers that it writes.

        The model holds ``tensors`` from then on, and its attributes may be written.
        """
        model = self.model
        args, kwargs = pytree.tree_unflatten(list(tensors.inputs), self.spec)
        # Not only during the forward: torch.utils.checkpoint runs parts of it again in backward.
        _hold(model, {**tensors.buffers, **tensors.params})
        own = [value.dtype for value in self.tensors.params.values() if value.is_floating_point()]
        with KernelEps(own):  # as in the capture
            outputs = model(*args, **kwargs)
        left = [
            tensor
            for each in captured.stored
            for tensor in each.tensors(getattr(model.get_submodule(each.path), each.name))
        ]
        written = {name: model.get_buffer(name) for name in captured.mutated}
        leaves, out_spec = pytree.tree_flatten(outputs)
        return ReferenceResult([*leaves, *left], out_spec, written)


def _hold(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the model's own tensors by ``tensors``, by name; tied ones under all names."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    new = {id(value): tensors[name] for name, value in own.items()}
    tables: list[dict[str, Any]] = [m._parameters for m in model.modules()]
    for held in tables + [m._buffers for m in model.modules()]:
        held.update({name: new.get(id(value), value) for name, value in held.items()})


# Passes before the model is sharded: on one device, with nothing dropped.


def _before_sharding(step: Step, options: CompileOptions) -> tuple[list[Comparison], Precision]:
    captured = step.capture()

    def run_eager(precision: Precision) -> Numbers:
        # A copy that may be written. It is made here, since tensors cannot be copied inside the
        # precision's dispatch mode.
        own = replace(step, model=copy.deepcopy(step.model))
        return undropped(own, partial(own.run_eager, captured), precision)

    eager = Reference.of(run_eager)
    _require_same_numbers(eager, run_eager)
    _require_numbers(step.name, eager.true)
    exported = undropped(step, partial(run_flat, captured), eager.precision)
    rows = [eager.compare(Pass.EXPORT, "model", exported)]
    # Later passes are compared with the capture: eager code may branch on the dtype.
    true = Reference(eager.precision, exported, eager.noise, eager.rounding)
    rows += compare_passes(step, captured, options, true)[0]
    return rows, true.precision


def _require_same_numbers(eager: Reference, run: Callable[[Precision], Numbers]) -> None:
    """Raise an error for a model that is not deterministic: no difference, however large, would be
    above its noise floor."""
    if eager.precision is not FLOAT64 or eager.noise <= _NOT_ROUNDING:
        return  # in lower precision, rounding may differ that much
    error = run(eager.precision).worst(eager.true)
    if error > _NOT_ROUNDING:
        raise ArgumentError(
            f"model: two forwards of the same inputs, with the same torch seed, differ by "
            f"{error:.0e}, so they cannot be compared; draw random numbers with torch (not "
            "random, numpy or a clock), and keep state that changes between calls in buffers"
        )


def _require_numbers(name: str, numbers: Numbers) -> None:
    """Raise an error for a model without results to compare: NaN equals NaN here."""
    tensors = [item for item in numbers.outputs if isinstance(item, Tensor)]
    if not tensors:
        raise ArgumentError(
            f"model: {name} returns no tensor for these inputs, so there is nothing to "
            "compare; let its forward return the loss or its results"
        )
    # If the loss is NaN, so are all gradients, whatever else the model returns.
    for kind, values in (("output", tensors), ("gradient", numbers.grads.values())):
        known = [each for each in values if each is not None and each.numel()]
        floating = list(filter(carries_gradient, known))
        if floating and not any(bool(each.isfinite().any()) for each in floating):
            raise ArgumentError(
                f"model: {name} has no {kind} with a finite value for these inputs, so there is "
                "nothing to compare; use weights and example_inputs of an ordinary step"
            )


def compare_passes(
    step: Step, captured: Captured, options: CompileOptions, true: Reference
) -> tuple[list[Comparison], Program | None]:
    """Compare ``captured`` after each pass before sharding with its results ``true``.

    The second result is the program after the last one, ``None`` if a pass rejected its graph.
    """
    rows: list[Comparison] = []

    def compare(name: str, left: Captured | Program) -> None:
        reference = true
        if draws_numbers(left):
            # Each call of a program has its own seed, and so other random numbers than the capture.
            counted = None if isinstance(left, Program) else _counted(step)
            if counted is None:
                return
            reference = Reference.of(partial(undropped, step, partial(run_flat, counted)))
        try:
            numbers = undropped(step, partial(run_flat, left), reference.precision)
        except Exception as error:  # an operator may raise anything for wrong operands
            rows.append(reference.failed(name, "model", error))
        else:
            rows.append(reference.compare(name, "model", numbers))

    try:
        return rows, to_program(captured, options, PassRunner(observer=compare))
    except PassError as error:
        rows.append(true.failed(error.pass_name, "model", error))
    return rows, None


def draws_numbers(left: Captured | Program) -> bool:
    """Return whether it draws random numbers other than dropout masks."""
    return any(map(draws_uniform, left.regions if isinstance(left, Program) else [left]))


def _counted(step: Step) -> Captured | None:
    """Return a capture that draws from the counter, as graphs after later passes do."""
    captured = step.capture()
    try:
        draw_by_counter(captured, stored=False)
    except UnsupportedError:  # a dropout inside of fused attention, which needs several passes
        return None
    return captured


def undropped(
    step: Step, run: Callable[[Tensors], ReferenceResult], precision: Precision
) -> Numbers:
    """Return outputs and gradients of ``run`` without dropout."""
    return step.numbers(run, precision, NothingDropped)


def run_flat(graph: Captured | Program, tensors: Tensors) -> ReferenceResult:
    """Return the results of an unsharded graph."""
    run: Any = run_program if isinstance(graph, Program) else run_captured
    result: ReferenceResult = run(
        graph, tensors.params, tensors.buffers, tensors.inputs, torch.tensor(_SEED, device="cpu")
    )
    return result


# Passes from sharding on: on simulated ranks, with dropout.


def _after_sharding(step: Step, options: CompileOptions, run: PassRunner) -> Iterator[Comparison]:
    captured = run.once(Pass.EXPORT, capture, step.model, step.args, step.kwargs)
    program = to_program(captured, options, run)
    # As in sharding, so that each block has the same outputs as the sharded one.
    routed = route_outputs(program).program
    # Real inputs of each block, recorded in the reference run.
    call_inputs: list[list[Any]] = []

    def run_reference(tensors: Tensors) -> ReferenceResult:
        result = run_flat(routed, tensors)
        call_inputs[:] = result.call_inputs
        return result

    true = Reference.of(lambda precision: step.numbers(run_reference, precision))
    try:
        compiled = Compilation(program, options, run=run).finish(options)
    except PassError as error:
        yield true.failed(error.pass_name, "model", error)
        if error.pass_name != Pass.CHECK:
            return
        run.forget_from(Pass.SHARD)  # also forgets operators replicated because of the error
        compiled = Compilation(program, options, checked=False, run=run).finish(options)

    def rows(variants: Mapping[str, CompiledProgram]) -> Iterator[Comparison]:
        for stage, variant in variants.items():
            yield _simulated(stage, variant, step, true)
        yield from check_blocks(
            routed,
            variants,
            lambda index, spread: BlockData.random(
                routed.calls[index].region, call_inputs[index], spread
            ),
        )

    compared = list(rows(variants_by_pass(compiled)))
    bad = {row.stage for row in compared if not row.ok}
    if Pass.PARTITION in bad and Pass.SHARD not in bad:
        # A pass between the two may be to blame; comparing these takes as long again.
        compared = list(rows(variants_by_pass(compiled, joint=True)))
    yield from compared


def _simulated(stage: str, compiled: CompiledProgram, step: Step, true: Reference) -> Comparison:
    tensors = step.tensors.leaves(true.precision)
    try:
        result = simulate_step(
            compiled,
            tensors.params,
            tensors.buffers,
            tensors.inputs,
            torch.tensor(_SEED, device="cpu"),
            mode=true.precision.entered,
        )
    except Exception as error:  # wrong code may raise anything
        return true.failed(stage, "model", error)
    grads = {name: result.grads.get(name) for name in tensors.params}
    grads |= {f"input {index}": grad for index, grad in enumerate(result.input_grads)}
    numbers = Numbers(result.outputs, grads, result.mutated_buffers)
    return true.compare(stage, "model", numbers)
