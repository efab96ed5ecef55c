"""The public API: :func:`compile`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.placement import Placement
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.hints import Hint, parameters_of, wishes_of
from sp_compiler.module.distributed_module import DistributedModule
from sp_compiler.options import Backend, CompileOptions, Dropout, Outputs
from sp_compiler.runtime.group import device_type_of, tensor_parallel_group


def compile(
    model: nn.Module,
    *,
    tp: int | None = None,
    mesh: DeviceMesh | None = None,
    example_inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
    sequence_parallel: bool = True,
    recompute: str = "selective",
    memory_budget: int | str | None = None,
    dropout: Dropout = "regenerate",
    overlap: bool = True,
    backend: Backend = "eager",
    outputs: Outputs = "auto",
    nominal_tokens: int = 8192,
    hints: Mapping[str, Hint] | None = None,
) -> DistributedModule:
    """Turn an unmodified model into a tensor- and sequence-parallel module.

    The result is called like the model, on every rank with the same whole inputs, and returns the
    model's own output type. It takes over the model's parameters, as DTensors under the same names;
    the model itself raises when it is called afterwards. Where compilation fails, the model is as
    before.

    The first call, or ``example_inputs``, compiles for its sizes. The first call of other sizes
    compiles once more and leaves all sizes above 1 open, for every later call that takes the same
    path through the model; one that does not is compiled again, with a warning. With a
    ``memory_budget`` every size is compiled by itself.

    Args:
        model: any ``nn.Module`` that ``torch.export`` can capture.
        tp: number of tensor-parallel ranks; the default process group must have as many.
        mesh: instead of ``tp``, a mesh with an axis named "tp".
        example_inputs: (args, kwargs); compile and place the parameters now instead of at the first
            call, which is needed before an optimizer loads state.
        sequence_parallel: shard norms, dropouts and residuals by tokens (arXiv 2205.05198,
            section 4.2.2).
        recompute: what backward recomputes. ``"none"``: nothing but gathers; ``"attention"``: the
            attention core (arXiv 2205.05198, section 5); ``"selective"``: also everything pointwise
            or row-wise; ``"full"``: all but the inputs of each block, where what runs last (the
            loss head, not several) is ``"selective"``; ``"auto"``: what takes least estimated time
            within ``memory_budget``, chosen for each block.
        memory_budget: with ``"auto"``: what the peak of activations on a rank may be, as
            :func:`sp_compiler.plan` counts it, in bytes or as "12GiB".
        dropout: ``"regenerate"`` masks in backward or keep them ``"stored"``.
        overlap: in backward, run gradients of weights and what is computed again while collectives
            of the same block are on their way.
        backend: ``"eager"``; ``"inductor"`` is not in this version.
        outputs: ``"replicate"``: whole on every rank; ``"shard"``: DTensors where the model makes
            them sharded; ``"auto"``: so if the model also returns its loss.
        nominal_tokens: placements are chosen for batches of this many tokens, or of the example's
            number if that is larger.
        hints: placements of parameters that you decide, ``{"layers.*.mlp.up": Shard(0)}``. A key is
            the dotted name of a parameter as in ``model.named_parameters()``, or of a module, which
            means its ``weight``; ``*``, ``?`` and ``[abc]`` stand for what they do in file names,
            and like there for nothing beyond the next dot. A value is ``Shard(dim)`` or
            ``Replicate()`` of ``torch.distributed.tensor``, or :func:`sp_compiler.forbid` of them.
            Layers of which some have a hint and others none become different blocks. Of a fused
            dim (q, k and v in one weight) each part is sharded.

    Raises:
        ArgumentError: an argument outside what is allowed, no process group of the right size, a
            model that was compiled before, a hint that matches nothing or cannot be met, a budget
            too small for it (at the first call unless there are ``example_inputs``); the message
            says the least that would do.
        UnsupportedError: an option of a later version, or hooks inside the model.
        CaptureError: the model has control flow that depends on data.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model={type(model).__name__}: expected a torch.nn.Module")
    group = tensor_parallel_group(tp, mesh, device_type_of(model))
    options = CompileOptions(
        tp=group.world_size,
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
    wishes_of(options.hints, parameters_of(model))  # raises before anything is taken over

    def compile_for(
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: dict[str, Placement] | None,
        open_dims: bool,
    ) -> CompiledProgram:
        return build(module, args, kwargs, options, fixed=fixed, open_dims=open_dims)

    if example_inputs is None:
        return DistributedModule(model, group, compile_for, options=options.texts())
    args, kwargs = _check_example_inputs(example_inputs)
    result = DistributedModule(model, group, compile_for, options=options.texts())
    try:
        result.prepare(*args, **kwargs)
    except Exception:
        result.give_back()
        raise
    return result


def _check_example_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if (
        not isinstance(example_inputs, tuple)
        or len(example_inputs) != 2
        or not isinstance(example_inputs[0], (tuple, list))
        or not isinstance(example_inputs[1], Mapping)
    ):
        raise ArgumentError(
            "example_inputs: expected (args, kwargs), a tuple of a tuple and a dict, such as "
            f"((), {{'input_ids': ids}}); got {type(example_inputs).__name__}"
        )
    return tuple(example_inputs[0]), dict(example_inputs[1])
