"""Programs that are compiled once for several modules of a test, and for all ranks of a grid.

All ranks compile the same program, each for itself, and tests of what happens afterwards train the
same model over and over: most of their time were compilations that had been made before. That ranks
compile the same is proven elsewhere (``tests/usage/test_ranks_agree.py``, and wherever ranks run
without this).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sp_compiler import api, compiler
from sp_compiler.grid_plan import settings
from sp_compiler.ir.captured import Captured
from sp_compiler.options import CompileOptions
from sp_compiler.pipeline_parallel.schedules import schedule_of
from sp_compiler.planning.planned_program import PlannedProgram
from sp_compiler.trace.attributes.reads import recorded_attributes
from sp_compiler.trace.export import capture

# With the attributes that forward read, which are a part of the key of a module's programs.
_KNOWN: dict[str, tuple[PlannedProgram, list[tuple[str, str]]]] = {}


@contextlib.contextmanager
def shared_programs(*, only_known: bool = False) -> Iterator[None]:
    """Context in which equal models with equal inputs and options are compiled once a process.

    Models are equal if they are of one class, and so are all modules inside, with equal numbers and
    texts as attributes, and functions of the same names there and as hooks, and parameters and
    buffers of the same kind. With ``only_known`` a program that :func:`compile_for_ranks` has not
    made is an error.
    """
    build = api.build

    def known_or_built(
        model: nn.Module, args: Any, kwargs: Any, options: CompileOptions, **settings: Any
    ) -> PlannedProgram:
        with mock.patch.object(nn.Module, "__getattribute__", object.__getattribute__):
            key = _key(model, (args, kwargs), options, settings)
        if key not in _KNOWN:
            assert not only_known, f"not compiled before, on one process: {options}"
            with recorded_attributes(model) as reads:
                program = build(model, args, kwargs, options, **settings)
            names = [(path, reads.names[id(module)]) for path, module in model.named_modules()]
            _KNOWN[key] = program, [(path, name) for path, found in names for name in found]
            return program
        program, attributes = _KNOWN[key]
        for path, name in attributes:
            getattr(model.get_submodule(path), name, None)
        return program

    with mock.patch.object(api, "build", known_or_built):
        yield


@contextlib.contextmanager
def shared_captures() -> Iterator[None]:
    """Context in which equal models are captured once for equal inputs, whatever their options.

    Of models as in :func:`shared_programs`. Plans of large models take most of their time for it.
    """
    known: dict[str, Captured] = {}

    def known_or_captured(model: nn.Module, args: Any, kwargs: Any, **how: Any) -> Captured:
        key = _key(model, (args, kwargs), None, how)
        if key not in known:
            known[key] = capture(model, args, kwargs, **how)
        return known[key].copy()

    with (
        mock.patch.object(compiler, "capture", known_or_captured),
        mock.patch.object(settings, "capture", known_or_captured),
    ):
        yield


@contextlib.contextmanager
def compiled_again() -> Iterator[None]:
    """Context in which none of the programs before are known, nor afterwards those made in it."""
    with mock.patch.dict(_KNOWN, clear=True):
        yield


def compile_for_ranks(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    tp: int = 1,
    ep: int = 1,
    fsdp: bool = False,
    schedule: str | None = None,
    **options: Any,
) -> None:
    """Compile in :func:`shared_programs` what ranks will ask for.

    Args:
        model: as they have it.
        inputs: of a call, or of a microbatch; by position or by keyword.
        tp: as along the axis of the mesh.
        ep: as along the axis of the mesh.
        fsdp: whether FSDP2 is applied by :func:`sp_compiler.compile`.
        schedule: of the pipeline of two ranks, if there is one.
        options: of :func:`sp_compiler.compile`.
    """
    staged = schedule is not None
    checked = CompileOptions.of(tp, options, in_stages=staged)  # type: ignore[arg-type]
    checked = replace(checked, ep=ep, layers_apart=fsdp)
    if schedule is not None:
        plan, _ = schedule_of(schedule, None, 2, 4)
        checked = replace(
            checked, tables_apart=True, split_backward=plan.delays_weights, loss_only=True
        )
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    api.build(model, args, kwargs, checked, fixed=None, open_dims=False, keep="stages")


def _key(
    model: nn.Module, inputs: Any, options: CompileOptions | None, settings: dict[str, Any]
) -> str:
    leaves, structure = pytree.tree_flatten(inputs)
    tensors = [*model.named_parameters(), *model.named_buffers(), *enumerate(leaves)]
    facts = [
        repr(model),
        [_attributes(module) for module in model.modules()],
        [(name, _facts(value)) for name, value in tensors],
        structure,
        options,
        [
            (name, sorted(value.items()) if isinstance(value, dict) else value)
            for name, value in sorted(settings.items())
        ],
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        Tensor.to.__name__,  # another one where casts to float32 are lifted
    ]
    return "\n".join(map(str, facts))


def _attributes(module: nn.Module) -> str:
    found: dict[str, Any] = {"": type(module)}
    for name, value in vars(module).items():
        if name.startswith("_sp_"):  # that its parameters have been taken over
            continue
        if isinstance(value, bool | int | float | str | tuple | None):
            found[name] = value
        elif "_hooks" in name:
            found[name] = list(map(_name, value.values()))
        elif name == "config":
            found[name] = repr(value)
        elif callable(value) and not isinstance(value, nn.Module):
            found[name] = _name(value)
    return str(found)


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)


def _facts(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{value.dtype} {value.device} {[*value.shape]} {value.stride()} {value.requires_grad}"
