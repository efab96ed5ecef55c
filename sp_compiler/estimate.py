"""Plans without ranks: what compiling a model for any number of ranks would cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sp_compiler.base.errors import ArgumentError
from sp_compiler.compiler import build
from sp_compiler.ir.hints import Hint, parameters_of, wishes_of
from sp_compiler.options import Backend, CompileOptions, Dropout, Outputs
from sp_compiler.planning.plan import Plan

ExampleInputs = tuple[tuple[Any, ...], Mapping[str, Any]]


def plan(
    model: nn.Module,
    example_inputs: ExampleInputs,
    tp: int = 8,
    *,
    sequence_parallel: bool = True,
    recompute: str = "selective",
    memory_budget: int | str | None = None,
    dropout: Dropout = "regenerate",
    overlap: bool = True,
    backend: Backend = "eager",
    outputs: Outputs = "auto",
    nominal_tokens: int = 8192,
    hints: Mapping[str, Hint] | None = None,
) -> Plan:
    """What :func:`sp_compiler.compile` would make of ``model`` on ``tp`` ranks.

    Runs in one process on shapes alone: nothing is computed, no process group is needed or touched,
    and ``model`` is left as it is. A model too large for this machine is built under
    ``torch.device("meta")``.

    >>> with torch.device("meta"):
    ...     model = GPT2LMHeadModel(config).bfloat16()
    >>> print(sp_compiler.plan(model, ((), {"input_ids": ids, "labels": ids}), tp=8))

    Args:
        model: in the mode (train or eval, autocast) to plan for.
        example_inputs: (args, kwargs); of tensors only shape and type matter.
        tp: number of tensor-parallel ranks.

    The other options are those of :func:`sp_compiler.compile`.

    Raises:
        ArgumentError: an argument outside what is allowed, a budget that is too small.
        UnsupportedError: an option of a later version, or hooks inside the model.
        CaptureError: the model has control flow that depends on data.
    """
    args, kwargs = checked_inputs(model, example_inputs)
    options = CompileOptions(
        tp=tp,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        memory_budget=memory_budget,
        dropout=dropout,
        overlap=overlap,
        backend=backend,
        outputs=outputs,
        nominal_tokens=nominal_tokens,
        hints={} if hints is None else hints,
    )
    wishes_of(options.hints, parameters_of(model))  # raises before the model is captured
    found = build(model, args, kwargs, options).plan
    assert isinstance(found, Plan)
    return found


def checked_inputs(model: Any, example_inputs: Any) -> ExampleInputs:
    """``example_inputs`` if it is what it must be.

    Raises:
        ArgumentError: no module, or inputs that are not (args, kwargs).
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={type(model).__name__}: expected a torch.nn.Module")
    if (
        not isinstance(example_inputs, tuple)
        or len(example_inputs) != 2
        or not isinstance(example_inputs[0], (tuple, list))
        or not isinstance(example_inputs[1], Mapping)
    ):
        raise ArgumentError(
            "example_inputs: expected (args, kwargs), a tuple and a dict, such as "
            '((), {"input_ids": ids, "labels": ids})'
        )
    return tuple(example_inputs[0]), example_inputs[1]
