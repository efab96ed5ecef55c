"""The part of a compiled program that one pipeline stage runs.

::

    calls      Tables Prologue | h.0 h.1 | h.2 Epilogue
    stage 0    Tables Prologue                sends hidden
    stage 1    Tables h.0 h.1                 receives hidden, sends hidden
    stage 2    Tables h.2 Epilogue            receives hidden, returns the loss

A value that skips a stage (an encoder's output, a router's logits) is received and sent on by every
stage in between. Values that depend on inputs alone are not sent: each stage that reads them
calls ``Tables``: elementwise work at memory bandwidth, which is many times that of a link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sp_compiler.base.decisions import NumberRead
from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.fx import ancestors
from sp_compiler.ir.program import Call, Program, Ref


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        compiled: its calls; received values are numbered after the user's inputs. It returns the
            values of ``sent``; on the last stage the loss, then :func:`returned_refs`.
        num_inputs: number of the user's inputs before them.
        received: received values, as refs of the full program.
        sent: values received by the next stage.
        received_like: meta tensors like the received values, one rank's part.
        returned_like: meta tensors like the sent values; on the last stage, like the loss.
        parameters: stored names of the parameters that it uses.
        buffers: names of the buffers that it uses or writes.
        rest: the same calls with ``recompute_rest``; ``None`` if ``compiled`` runs all of them.
        saving: the microbatches that ``compiled`` runs; ``rest`` runs the others.
    """

    compiled: CompiledProgram
    num_inputs: int
    received: tuple[Ref, ...]
    sent: tuple[Ref, ...]
    received_like: tuple[Tensor, ...]
    returned_like: tuple[Tensor, ...]
    parameters: frozenset[str]
    buffers: frozenset[str]
    rest: CompiledProgram | None = None
    saving: frozenset[int] = frozenset()


def is_table(program: Program, call: Call) -> bool:
    """Return whether the results of ``call`` depend on inputs alone and need no gradient."""
    fixed = all(ref.kind in ("input", "buffer", "constant", "size") for ref in call.args)
    return fixed and not any(node.meta.get("requires_grad") for node in call.region.outputs)


def loss_of(program: Program) -> Ref:
    """Return the loss: the scalar output with a gradient that the model calls ``loss``, or else the
    first one.

    Raises:
        ArgumentError: there is none.
    """
    loss = program.loss
    if loss is not None:
        return loss
    raise ArgumentError(
        "the model returns no loss: no output is a scalar with a gradient. A pipeline runs forward "
        "and backward of its microbatches in turns, so the loss has to come from the model: pass "
        "labels (HuggingFace models return it then), or compile a module whose forward calls the "
        "model and returns its loss"
    )


def returned_refs(program: Program) -> list[Ref]:
    """Return the sources of the model's outputs other than its loss, each once."""
    leaves = program.outputs[: program.out_spec.num_leaves]
    refs = dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Ref))
    return [ref for ref in refs if ref != loss_of(program)]


def chain_of(program: Program, loss: Ref) -> list[int]:
    """Return the indices of the calls that are divided into stages: those that the loss needs."""
    needed = _needed(program, {loss.index})
    return [i for i in sorted(needed) if not is_table(program, program.calls[i])]


def _needed(program: Program, wanted: set[int]) -> set[int]:
    """Return the indices of the calls ``wanted`` and of all whose values they read."""
    needed = set(wanted)
    for index in reversed(range(len(program.calls))):
        if index in needed:
            needed |= {ref.index for ref in program.calls[index].args if ref.kind == "call"}
    return needed


def stages_of(
    compiled: CompiledProgram, loss: Ref, chain: Sequence[int], ends: Sequence[int]
) -> list[Stage]:
    """Cut ``compiled`` before ``chain[end]`` for each of ``ends`` but the last.

    Raises:
        UnsupportedError: a buffer is written by one stage and read by another, or the forward reads
            a number from a buffer that it writes.
    """
    program = compiled.program
    _refuse_numbers_of_written_buffers(program)
    starts = [0, *ends[:-1]]
    parts = [list(chain[start:end]) for start, end in zip(starts, ends, strict=True)]
    stage_of = {index: stage for stage, part in enumerate(parts) for index in part}
    # Only what the loss needs: no gradient flows to other values.
    flowing = crossing(program, [loss], stage_of, len(parts))
    # A call that the loss does not need (the running mean of a batch norm, a second head) belongs
    # to the last stage that has values that it reads.
    returned = [loss, *returned_refs(program)]
    others = [ref for ref in (*program.mutated_buffers.values(), *returned) if ref.kind == "call"]
    for index in sorted(_needed(program, {ref.index for ref in others}) - set(chain)):
        call = program.calls[index]
        if not is_table(program, call):
            read = [ref.index for ref in call.args if ref.kind == "call"]
            stage_of[index] = max((stage_of[i] for i in read if i in stage_of), default=0)
            parts[stage_of[index]].append(index)
    received = crossing(program, returned, stage_of, len(parts))
    # A counter that is a table is computed on several stages, and written by the first.
    written = [
        {
            name: ref
            for name, ref in program.mutated_buffers.items()
            if stage_of.get(ref.index, 0) == i
        }
        for i in range(len(parts))
    ]
    kept = [list(each.values()) for each in written]
    kept[-1] += returned
    parts = [[*_tables(program, part, kept[stage]), *part] for stage, part in enumerate(parts)]
    _refuse_shared_buffers(program, parts, written)
    messages = [
        {ref: sent_like(compiled, ref, flows=ref in flowing[stage]) for ref in refs}
        for stage, refs in enumerate(received)
    ]
    return [
        _stage(compiled, part, messages[stage], messages[stage + 1], returned, written[stage])
        for stage, part in enumerate(parts)
    ]


def _tables(program: Program, part: Sequence[int], kept: Iterable[Ref]) -> list[int]:
    """Return the indices of the tables that a stage reads, returns or writes into a buffer."""
    refs = [*kept, *(ref for index in part for ref in program.calls[index].args)]
    read = {ref.index for ref in refs if ref.kind == "call"}
    return [i for i in sorted(read) if is_table(program, program.calls[i])]


def crossing(
    program: Program, returned: Sequence[Ref], stage_of: dict[int, int], num_stages: int
) -> list[list[Ref]]:
    """Return the values that each stage receives, plus an empty entry for those that the last one
    sends.

    Args:
        returned: values that the last stage returns.
        stage_of: stage by index of each divided call; tables are in none.
    """
    received: list[set[Ref]] = [set() for _ in range(num_stages + 1)]
    uses = [(ref, stage_of[i]) for i in stage_of for ref in program.calls[i].args]
    for ref, user in [*uses, *((ref, num_stages - 1) for ref in returned)]:
        if ref.kind == "call" and ref.index in stage_of:
            # Through every stage in between: schedules send to neighbours only.
            for stage in range(stage_of[ref.index] + 1, user + 1):
                received[stage].add(ref)
    # Sorted: the sender and the receiver must use the same order.
    return [sorted(refs, key=lambda ref: (ref.index, ref.output)) for refs in received]


def _stage(
    compiled: CompiledProgram,
    part: Sequence[int],
    received: Mapping[Ref, Tensor],
    sent: Mapping[Ref, Tensor],
    returned: Sequence[Ref],
    written: Mapping[str, Ref],
) -> Stage:
    program = compiled.program
    new_index = {old: new for new, old in enumerate(part)}
    # Of the entire program, so that all stages number received values the same way; including
    # values that it only returns, or stores in a buffer.
    reads = [ref for call in program.calls for ref in call.args]
    reads += [*returned, *program.mutated_buffers.values()]
    num_inputs = 1 + max((ref.index for ref in reads if ref.kind in ("input", "size")), default=-1)
    position = {ref: Ref("input", index=num_inputs + i) for i, ref in enumerate(received)}

    def moved(ref: Ref) -> Ref:
        if ref.kind != "call" or ref in position:
            return position.get(ref, ref)
        return replace(ref, index=new_index[ref.index])

    calls = [
        replace(program.calls[index], args=tuple(map(moved, program.calls[index].args)))
        for index in part
    ]
    results = list(sent or returned)
    outputs = [moved(ref) for ref in results]
    buffers = {name: moved(ref) for name, ref in written.items()}
    cut = replace(program, calls=calls, outputs=outputs, mutated_buffers=buffers)
    args = [*outputs, *(ref for call in calls for ref in call.args)]
    return Stage(
        replace(compiled, program=cut),
        num_inputs,
        tuple(received),
        tuple(sent),
        tuple(received.values()),
        tuple(sent.values()) or (sent_like(compiled, returned[0]),),
        frozenset(compiled.param_name(ref.name) for ref in args if ref.kind == "param"),
        frozenset(ref.name for ref in args if ref.kind == "buffer") | frozenset(written),
    )


def sent_like(compiled: CompiledProgram, ref: Ref, *, flows: bool = True) -> Tensor:
    """Return a meta tensor like one rank's part of ``ref``, whose gradient is needed if it
    ``flows``."""
    region = compiled.program.calls[ref.index].region
    value = region.outputs[ref.output].meta["val"]
    # On meta: torch's stages make their buffers from shapes and dtypes.
    like = torch.empty(tuple(map(int, value.shape)), dtype=value.dtype, device="meta")
    return like.requires_grad_(flows and compiled.differentiable[region.name][ref.output])


def _refuse_numbers_of_written_buffers(program: Program) -> None:
    numbers = [each for each in program.decisions if isinstance(each, NumberRead)]
    for each in numbers:
        for name in sorted(program.mutated_buffers.keys() & set(each.sources)):
            raise UnsupportedError(
                f"the forward reads a number from buffer {name!r}, which it also writes: {each}. "
                "The number may change between the microbatches of a step, which run one program, "
                "and other stages do not have what is written: pass it as an argument, or write "
                "the buffer between steps"
            )


def _refuse_shared_buffers(
    program: Program, parts: Sequence[Sequence[int]], written: Sequence[Mapping[str, Ref]]
) -> None:
    writer_of = {name: stage for stage, names in enumerate(written) for name in names}
    for stage, part in enumerate(parts):
        for name in sorted(_buffers_read(program, part) & writer_of.keys()):
            if stage != writer_of[name]:
                raise UnsupportedError(
                    f"buffer {name!r} is written by stage {writer_of[name]} of the pipeline and "
                    f"read by stage {stage}: each stage has buffers of its own; pass the value "
                    "as an argument, or write the buffer between steps"
                )


def _buffers_read(program: Program, part: Sequence[int]) -> set[str]:
    """Return the names of the buffers that the calls of ``part`` depend on."""
    names = set()
    used = [ref for index in part for ref in program.calls[index].args if ref.kind == "call"]
    for index in part:
        call = program.calls[index]
        outputs = call.region.outputs
        if is_table(program, call):
            # Each stage runs the entire table, but needs only the outputs that it reads.
            outputs = [outputs[ref.output] for ref in used if ref.index == index]
        origins = ancestors(outputs)
        names |= {ref.name for node, ref in call.inputs if ref.kind == "buffer" and node in origins}
    return names
