"""The block of a small HuggingFace Llama, compiled for two ranks, as text after every pass."""

from __future__ import annotations

import functools

import torch

from docs.generate.one_block import block_text
from sp_compiler.base.pass_report import Pass
from sp_compiler.compiler import Compilation, to_program
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.options import CompileOptions
from sp_compiler.pass_manager.runner import PassRunner
from sp_compiler.trace.export import capture
from tests.models import zoo

_BLOCK = "LlamaDecoderLayer"


@functools.cache
def compiled(recompute: str) -> CompiledProgram:
    """Two layers, four heads over two key/value heads, no dropout; captured and sharded once."""
    return _compilation().finish(CompileOptions(tp=2, recompute=recompute))


@functools.cache
def _compilation() -> Compilation:
    model, inputs = zoo.build("llama", dtype=torch.float32), zoo.inputs("llama", batch=2, seq=8)
    options, run = CompileOptions(tp=2), PassRunner()
    captured = run.once(Pass.EXPORT, capture, model, (), inputs)
    return Compilation(to_program(captured, options, run), options, run=run)


def stage_text(stage: Snapshot) -> str:
    """The graphs of the block; before it is a region of its own, its first use in the model."""
    return block_text(stage, _BLOCK, "model.layers.0")


def code_text(recompute: str) -> str:
    """The generated class of the block."""
    return compiled(recompute).regions[_BLOCK].source
