"""Reproduction of a failed compilation from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sp_compiler.compiler import compile_captured
from sp_compiler.ir.captured import Captured
from sp_compiler.pass_manager.reproduction import SAVED, FailedCompilation
from sp_compiler.pass_manager.runner import PassRunner
from sp_compiler.rules.custom import rule
from sp_compiler.verification.proof import prove, prove_rules
from sp_compiler.verification.verify import Step, Tensors


def reproduce(folder: Path) -> None:
    """Compile the graph in ``folder``, and verify its results if the original call did.

    Raises:
        Exception: the error of the compilation that failed.
    """
    failed = FailedCompilation.load(folder / SAVED)
    # First, because sharding reads the table of rules, and this process lacks the user's rules.
    for arguments, options in failed.rules:
        rule(*arguments, **options)
    step = _SavedStep.of_failed(failed)
    # A copy, as passes rewrite the graph and the comparison reads the original afterwards.
    captured, run = step.capture(), PassRunner()
    compiled = compile_captured(
        captured, failed.options, failed.name, failed.fixed, "unsharded", run
    )
    (prove if failed.verify else prove_rules)(step, failed.options, compiled)


@dataclass(frozen=True)
class _SavedStep(Step):
    """A step of a model that only exists as a saved graph."""

    failed: FailedCompilation | None = None

    @classmethod
    def of_failed(cls, failed: FailedCompilation) -> _SavedStep:
        captured = failed.captured
        pairs = list(zip(captured.refs, captured.placeholders, strict=True))
        # Without values: the comparison uses random ones.
        params: dict[str, Tensor] = {
            ref.name: nn.Parameter(
                torch.empty_like(node.meta["val"], device="meta"),
                requires_grad=node.meta["requires_grad"],
            )
            for ref, node in pairs
            if ref.kind == "param"
        }
        tensors = Tensors(params, failed.buffers, failed.inputs)
        return cls(captured.module, (), {}, captured.in_spec, tensors, failed=failed)

    @property
    def name(self) -> str:
        assert self.failed is not None
        return self.failed.name

    def capture(self) -> Captured:
        assert self.failed is not None
        return self.failed.captured.copy()
