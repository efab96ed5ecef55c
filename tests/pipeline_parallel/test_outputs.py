"""Outputs of a pipeline beside its loss."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import sp_compiler
from sp_compiler import UnsupportedError
from sp_compiler.compiler import build
from sp_compiler.options import CompileOptions
from sp_compiler.pipeline_parallel.microbatches import batch_lengths, joined
from tests.helpers.rehearsal import run_rehearsed
from tests.models import zoo

MICROBATCHES = 4


class _Scored(nn.Module):
    """Three layers, a loss, and outputs of each stage that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.score = nn.Linear(16, 3)

    def forward(self, x: Tensor, shift: Tensor, scale: float = 2.0) -> dict[str, Any]:
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
            "bias": self.layers[2].bias,
            "shift": shift,
        }


def _scored() -> nn.Module:
    torch.manual_seed(0)
    return _Scored().double()


def _truth(*batch: Tensor) -> tuple[dict[str, Any], dict[str, Tensor | None]]:
    """Outputs and gradients of one device."""
    model = _scored()
    outputs = model(*batch)
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
    for name in ("first", "scores", "doubled", "same", "bias", "shift"):
        if is_last:
            torch.testing.assert_close(_whole(outputs[name]), expected[name])
            assert not outputs[name].requires_grad
        else:
            assert outputs[name] is None


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def _pipeline(model: nn.Module, *args: Tensor, **options: Any) -> Any:
    kwargs = options.pop("kwargs", {})
    inputs = args, kwargs
    return sp_compiler.pipeline(
        model, mesh=_mesh(), example_inputs=inputs, microbatches=MICROBATCHES, **options
    )


_SCORED: tuple[dict[str, Any], ...] = (
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "return_outputs": True},
    {"schedule": "zero_bubble", "return_outputs": True},
)
_LLAMA: tuple[dict[str, Any], ...] = ({}, {"return_outputs": True, "outputs": "replicate"})


def _batch() -> list[Tensor]:
    """The second belongs to every microbatch."""
    generator = torch.Generator().manual_seed(1)
    sizes = (2 * MICROBATCHES, 4, 16), (1, 16)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def _returned() -> None:
    is_last = _mesh().get_local_rank("pp") == 1
    batch = _batch()
    expected, gradients = _truth(*batch)
    for options in _SCORED:
        pipeline = _pipeline(_scored(), *batch, **options)
        if "return_outputs" not in options:
            with pytest.raises(UnsupportedError, match=r"\['score.bias', 'score.weight'\].*loss"):
                pipeline.eval(*batch)
            continue
        _check(pipeline.step(*batch), expected, is_last=is_last)
        _check(pipeline.eval(*batch), expected, is_last=is_last)
        torch.testing.assert_close(pipeline.eval_loss(*batch), expected["losses"][0])
        for name, parameter in pipeline.named_parameters():
            assert (parameter.grad is None) == (gradients[name] is None)
            torch.testing.assert_close(_whole(parameter.grad), gradients[name])


def _logits() -> None:
    """The model's own type, on every rank."""
    batch = zoo.inputs("llama", batch=2 * MICROBATCHES)
    pipeline = _pipeline(zoo.build("llama", layers=2), kwargs=batch, **_LLAMA[0])
    truth = zoo.build("llama", layers=2).eval()
    outputs, expected = pipeline.eval(**batch), truth(**batch)
    assert type(outputs) is type(expected)
    torch.testing.assert_close(outputs.loss, pipeline.eval_loss(**batch))
    # Labels are missing: the mean of the microbatches is not that of the batch.
    parts = [{k: v[2 * i : 2 * i + 2] for k, v in batch.items()} for i in range(MICROBATCHES)]
    mean = torch.stack([truth(**part).loss for part in parts]).mean()
    torch.testing.assert_close(outputs.loss, mean.double(), rtol=1e-6, atol=1e-6)
    if _mesh().get_local_rank("pp") == 0:
        assert outputs.logits is None
        return
    # Sharded over the vocabulary, as the stage computes them.
    assert isinstance(outputs.logits, DTensor)
    torch.testing.assert_close(outputs.logits.full_tensor(), expected.logits)


def _full_logits() -> None:
    """Where full ones are asked for, on the ranks of the last stage."""
    batch = zoo.inputs("llama", batch=2 * MICROBATCHES)
    pipeline = _pipeline(zoo.build("llama", layers=2), kwargs=batch, **_LLAMA[1])
    expected = zoo.build("llama", layers=2)(**batch).logits
    if _mesh().get_local_rank("pp") == 1:
        for outputs in (pipeline.step(**batch), pipeline.eval(**batch)):
            assert not isinstance(outputs.logits, DTensor)
            torch.testing.assert_close(outputs.logits, expected.detach())
    else:
        assert pipeline.step(**batch).logits is None
        assert pipeline.eval(**batch).logits is None


def test_outputs_are_joined_along_the_batch_or_its_tokens() -> None:
    ids, positions = torch.zeros(2, 7, dtype=torch.long), torch.zeros(1, 5)
    lengths = batch_lengths([0.5, ids, positions], 2)
    assert lengths == [2, 14]
    halves = [0.5, 0.5]
    assert joined([torch.ones(2, 3), torch.zeros(2, 3)], halves, lengths).shape == (4, 3)
    assert joined([torch.ones(14, 3), torch.zeros(14, 3)], halves, lengths).shape == (28, 3)
    # States of four layers, tokens of each of eight experts, positions before a batch of one.
    for shape, count in (((4, 2, 3), 2), ((8,), 2), ((7, 1, 3), 1), ((2, 3), 4)):
        part = torch.ones(shape)
        with pytest.raises(UnsupportedError, match=f"for a microbatch of {count} rows.*the batch"):
            joined([part, part], halves, [count, 9 * count])
        assert joined([part], [1.0], [count]) is part


def test_scalars_are_averaged_in_their_own_dtype() -> None:
    # A mean over no tokens has no weight.
    empty, mean = torch.tensor(torch.nan), torch.tensor(3.0)
    zero, one = (torch.tensor(weight, dtype=torch.float64) for weight in (0.0, 1.0))
    actual = joined([empty, mean], [zero, one], [4])
    assert actual == 3.0
    assert actual.dtype == torch.float32
    third = joined([torch.ones((), dtype=torch.float64)] * 3, [1 / 3] * 3, [4])
    assert third == 1.0
    with pytest.raises(UnsupportedError, match=r"torch.int64 for a microbatch.*is not a mean"):
        joined([torch.tensor(3), torch.tensor(4)], [0.5, 0.5], [4])


def _compile() -> None:
    """What all pipelines above run: their own calls reach no other stage here."""
    scored, llama = _batch(), zoo.inputs("llama", batch=2 * MICROBATCHES)
    made = [
        *((_pipeline(_scored(), *scored, **each), scored, {}) for each in _SCORED),
        *(
            (_pipeline(zoo.build("llama", layers=2), kwargs=llama, **each), (), llama)
            for each in _LLAMA
        ),
    ]
    for pipeline, args, kwargs in made:
        for call in (pipeline.eval, pipeline.eval_loss):
            with contextlib.suppress(Exception):
                call(*args, **kwargs)


def _all() -> None:
    _returned()
    _logits()
    _full_logits()


@pytest.mark.slow
def test_what_a_pipeline_returns() -> None:
    run_rehearsed(4, _all, rehearsal=_compile)


@pytest.mark.slow
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
