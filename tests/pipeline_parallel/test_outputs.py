"""Outputs of a pipeline beside its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sp_compiler
from sp_compiler import UnsupportedError
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.pipeline_parallel.microbatches import joined
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

MICROBATCHES = 4


class _Scored(nn.Module):
    """Three layers, a loss, and outputs of each stage that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.score = nn.Linear(16, 3)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Any]:
        first = hidden = self.layers[0](x).relu()
        for layer in self.layers[1:]:
            hidden = layer(hidden).relu()
        return {
            "first": first,
            "scores": self.score(first),
            "doubled": x * scale,
            "scale": scale,
            "losses": (hidden.square().mean(), first.mean()),
            "same": hidden,
        }


def _scored() -> nn.Module:
    torch.manual_seed(0)
    return _Scored().double()


def _truth(batch: Tensor) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Outputs and gradients of one device."""
    model = _scored()
    outputs = model(batch)
    outputs["losses"][0].backward()
    return outputs, {name: parameter.grad for name, parameter in model.named_parameters()}


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check(outputs: Any, expected: dict[str, Any], *, is_last: bool) -> None:
    assert list(outputs) == list(expected)
    assert outputs["scale"] == 2.0
    torch.testing.assert_close(outputs["losses"][0], expected["losses"][0])
    if is_last:
        torch.testing.assert_close(outputs["losses"][1], expected["losses"][1])
    for name in ("first", "scores", "doubled", "same"):
        if is_last:
            torch.testing.assert_close(_whole(outputs[name]), expected[name])
            assert not outputs[name].requires_grad
        else:
            assert outputs[name] is None


def _returned() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    is_last = mesh.get_local_rank("pp") == 1
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2 * MICROBATCHES, 4, 16, generator=generator, dtype=torch.float64)
    expected, gradients = _truth(batch)
    for schedule, return_outputs in (("gpipe", False), ("1f1b", True), ("zero_bubble", True)):
        pipeline = sp_compiler.pipeline(
            _scored(),
            mesh=mesh,
            example_inputs=((batch,), {}),
            microbatches=MICROBATCHES,
            schedule=schedule,
            return_outputs=return_outputs,
        )
        if not return_outputs:
            with pytest.raises(UnsupportedError, match=r"\['score.bias', 'score.weight'\].*loss"):
                pipeline.eval(batch)
            continue
        _check(pipeline.step(batch), expected, is_last=is_last)
        _check(pipeline.eval(batch), expected, is_last=is_last)
        torch.testing.assert_close(pipeline.eval_loss(batch), expected["losses"][0])
        for name, parameter in pipeline.named_parameters():
            assert (parameter.grad is None) == (gradients[name] is None)
            torch.testing.assert_close(_whole(parameter.grad), gradients[name])


def _logits() -> None:
    """The model's own type, on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    batch = zoo.inputs("llama", batch=2 * MICROBATCHES)
    pipeline = sp_compiler.pipeline(
        zoo.build("llama", layers=2), mesh=mesh, example_inputs=((), batch), microbatches=4
    )
    truth = zoo.build("llama", layers=2).eval()
    outputs, expected = pipeline.eval(**batch), truth(**batch)
    assert type(outputs) is type(expected)
    torch.testing.assert_close(outputs.loss, pipeline.eval_loss(**batch))
    # Labels are missing: the mean of the microbatches is not that of the batch.
    parts = [{k: v[2 * i : 2 * i + 2] for k, v in batch.items()} for i in range(MICROBATCHES)]
    mean = torch.stack([truth(**part).loss for part in parts]).mean()
    torch.testing.assert_close(outputs.loss, mean.double(), rtol=1e-6, atol=1e-6)
    if mesh.get_local_rank("pp") == 0:
        assert outputs.logits is None
        return
    # Sharded over the vocabulary, as the stage computes them.
    assert isinstance(outputs.logits, DTensor)
    torch.testing.assert_close(outputs.logits.full_tensor(), expected.logits)


def test_outputs_without_a_batch_cannot_be_joined() -> None:
    pieces = [torch.ones(2, 3), torch.zeros(2, 3)]
    assert joined(pieces, [0.5, 0.5], 2).shape == (4, 3)
    with pytest.raises(UnsupportedError, match=r"shape \(2, 3\) for a microbatch of 4 rows"):
        joined(pieces, [0.5, 0.5], 4)
    # A mean over no tokens has no weight.
    empty, mean = torch.tensor(torch.nan), torch.tensor(3.0)
    assert joined([empty, mean], [torch.tensor(0.0), torch.tensor(1.0)], 4) == 3.0


def _both() -> None:
    _returned()
    _logits()


@pytest.mark.slow
def test_what_a_pipeline_returns() -> None:
    run_on_ranks(4, _both)


def test_a_step_keeps_no_logits() -> None:
    """With the loss alone, the head may be computed in chunks."""
    model, inputs = zoo.build("llama", layers=1), zoo.inputs("llama")
    plain, alone = (
        build(model, (), inputs, CompileOptions(tp=2, loss_only=loss_only, loss_chunks=2))
        for loss_only in (False, True)
    )
    chunked = [
        report.rewrites
        for each in (plain, alone)
        for report in each.reports
        if report.name == "chunk"
    ]
    assert chunked == [0, 1]
    assert alone.plan.activation_peak_bytes < plain.plan.activation_peak_bytes
    leaves = alone.program.outputs
    assert sum(leaf is not None for leaf in leaves) == 1
    assert len(leaves) == len(plain.program.outputs)
