"""Pipelines on gloo ranks against one device: losses, gradients, AdamW steps, order, memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import sp_compiler
from sp_compiler import ArgumentError, RankMismatchError, UnsupportedError, api
from sp_compiler.compiler import build
from tests.helpers.ranks import run_on_copies, run_on_ranks
from tests.helpers.rehearsal import run_rehearsed
from tests.helpers.shared_programs import compile_for_ranks, shared_programs
from tests.models import architectures, zoo

MICROBATCHES = 4
# HuggingFace's losses cast float64 logits to float32, where sums in another order differ by 1e-7.
_LIFTED = mock.patch.object(api, "build", functools.partial(build, lift_casts=True))


def _model(name: str, layers: int) -> nn.Module:
    if name == "mixtral":
        return architectures.build(name, architectures.size("dividing", 2))
    return zoo.build(name, layers=layers, dropout=0.1)


def _batch(name: str) -> dict[str, Any]:
    return zoo.inputs("llama" if name == "mixtral" else name, batch=2 * MICROBATCHES)


def _full(value: Any) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _one_device(name: str, layers: int, steps: int) -> tuple[list[float], Any, Any]:
    """Losses and norms of AdamW steps over the same microbatches; last gradients, parameters."""
    module = sp_compiler.compile(_model(name, layers), tp=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(MICROBATCHES):
            part = {k: v[2 * number : 2 * number + 2] for k, v in _batch(name).items()}
            loss = zoo.loss_of(module(**part)) / MICROBATCHES
            loss.backward()
            total += loss.item()
        gradients = {n: _full(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        losses += [total, sp_compiler.clip_grad_norm_(module, 0.5).item()]
        optimizer.step()
    return losses, gradients, {n: _full(p) for n, p in module.named_parameters()}


class _Trace:
    """Records in which order the code of a block runs, and how many calls are in flight."""

    def __init__(self, code: Any) -> None:
        self.events: list[str] = []
        self.in_flight = self.most = 0
        for method in ("forward", "backward", "backward_inputs", "backward_weights"):
            if hasattr(code, method):
                setattr(code, method, self._recorded(method, getattr(code, method)))

    def _recorded(self, method: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            self.events.append(method)
            self.in_flight += {"forward": 1, "backward_inputs": 0}.get(method, -1)
            self.most = max(self.most, self.in_flight)
            return function(*args)

        return staticmethod(run)


def _train(
    name: str, layers: int, schedule: str, steps: int, grid: Sequence[int]
) -> tuple[Any, list[float], Any]:
    mesh = init_device_mesh("cpu", tuple(grid), mesh_dim_names=("pp", "tp"))
    pipeline = sp_compiler.pipeline(
        _model(name, layers),
        mesh=mesh,
        example_inputs=((), _batch(name)),
        microbatches=MICROBATCHES,
        schedule=schedule,
    )
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3)
    torch.manual_seed(3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(**_batch(name)).item())
        gradients = {n: _full(p.grad) for n, p in pipeline.named_parameters() if p.grad is not None}
        losses.append(sp_compiler.clip_grad_norm_(pipeline, 0.5).item())
        optimizer.step()
    return pipeline, losses, gradients


def _compare(
    name: str, layers: int, schedule: str, steps: int, grid: Sequence[int]
) -> sp_compiler.PipelineModule:
    with _LIFTED, shared_programs():
        losses, gradients, parameters = _one_device(name, layers, steps)
        pipeline, own_losses, own_gradients = _train(name, layers, schedule, steps, grid)
    torch.testing.assert_close(own_losses, losses, rtol=1e-9, atol=1e-9)
    largest = max(grad.abs().max().item() for grad in gradients.values())
    for parameter, grad in own_gradients.items():
        expected = gradients[parameter]
        scale = max(expected.abs().max().item(), 1e-6 * largest)
        assert (grad - expected).abs().max().item() <= 1e-9 * scale, parameter
    own = {n: _full(p) for n, p in pipeline.named_parameters()}
    torch.testing.assert_close(own, {n: parameters[n] for n in own}, rtol=1e-9, atol=1e-9)
    # Every parameter is on some stage, and one rank owns it.
    owned: list[Any] = [None] * grid[0]
    names = [n for n, _ in pipeline.owned_parameters()]
    dist.all_gather_object(owned, names, group=pipeline._axis.group)
    assert sorted(n for names in owned for n in names) == sorted(parameters)
    return pipeline


def _two_stages() -> None:
    """GPT-2: tied embedding on both stages, dropout, masks made on each."""
    pipeline = _compare("gpt2", 2, "1f1b", 2, (2, 1))
    assert pipeline.stages == (("", "transformer.h.0"), ("transformer.h.1", ""))
    assert "class GPT2Block" in pipeline.code
    kept = {name for name, _ in pipeline.named_parameters()}
    assert "transformer.wte.weight" in kept
    assert len(kept) < len(list(_model("gpt2", 2).named_parameters()))
    _check_calls(pipeline)


def _check_calls(pipeline: sp_compiler.PipelineModule) -> None:
    """Evaluation, accumulation, and calls that cannot be."""
    batch = _batch("gpt2")
    first = pipeline.eval_loss(**batch)
    assert first == pipeline.eval_loss(**batch)
    with pytest.raises(ArgumentError, match="takes a batch and returns the model's outputs"):
        pipeline.eval()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"use eval\(\.\.\.\)"):
        pipeline.step(**batch)
    with pytest.raises(UnsupportedError, match="a forward hook on the whole model cannot run"):
        pipeline.module.register_forward_hook(print)
    mesh, hooked = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)), _model("gpt2", 2)
    hooked.register_full_backward_hook(print)
    with pytest.raises(UnsupportedError, match="a hook on the whole model cannot run"):
        sp_compiler.pipeline(hooked, mesh=mesh, example_inputs=((), batch), microbatches=4)
    # Two steps add up, those of tied parameters too, and where one between them is refused.
    once = []
    for _ in range(2):
        torch.manual_seed(1)
        for parameter in pipeline.parameters():
            parameter.grad = None
        pipeline.step(**batch)
        once.append({n: p.grad.clone() for n, p in pipeline.named_parameters()})
    with pytest.raises(ArgumentError, match="input_ids has a batch of 6"):
        pipeline.step(**{name: value[:6] for name, value in batch.items()})
    torch.manual_seed(1)
    pipeline.step(**batch)
    twice = {n: p.grad for n, p in pipeline.named_parameters()}
    torch.testing.assert_close(twice, {n: 2 * grad for n, grad in once[1].items()})
    torch.testing.assert_close(once[0], once[1])


def _failing() -> None:
    """All ranks catch an error in a microbatch's backward: the next step has nothing of it."""
    batch, mesh = _batch("gpt2"), init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    pipeline: Any = sp_compiler.pipeline(
        _model("gpt2", 2).eval(), mesh=mesh, example_inputs=((), batch), microbatches=4,
        schedule="zero_bubble",
    )  # fmt: skip
    runs: list[None] = []

    def fail(*_: Any) -> None:
        runs.append(None)
        if len(runs) == 2:
            raise ValueError("of the second microbatch")

    grads = []
    for fails in (False, True, False):
        for parameter in pipeline.parameters():
            parameter.grad = None
        if fails:
            hook = pipeline.module.transformer.h[0].register_full_backward_hook(fail)
            with pytest.raises(ValueError, match="of the second microbatch"):
                pipeline.step(**batch)
            hook.remove()
        else:
            pipeline.step(**batch)
            grads.append({n: p.grad.to_local() for n, p in pipeline.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


def _on_two_ranks() -> None:
    _two_stages()
    _failing()


def test_two_stages() -> None:
    run_rehearsed(2, _on_two_ranks)


_Cases = Sequence[tuple[str, int, str, int, Sequence[int]]]


def _compile(cases: _Cases) -> None:
    """Programs of one device, and those that are cut into stages."""
    with _LIFTED, shared_programs():
        for name, layers, schedule, _, (_, tp) in cases:
            micro = {key: value[:2] for key, value in _batch(name).items()}
            compile_for_ranks(_model(name, layers), micro)
            compile_for_ranks(_model(name, layers), micro, tp=tp, schedule=schedule)


def _schedules(cases: _Cases) -> list[str]:
    return [str(_compare(*case).stages) for case in cases]


@pytest.mark.slow
def test_schedules_on_two_ranks() -> None:
    cases = [
        ("gpt2", 4, "zero_bubble", 4, (2, 1)),
        ("gpt2", 4, "dualpipev", 3, (2, 1)),
        ("llama", 4, "interleaved", 3, (2, 1)),
        # Its table of relative positions is sent too, a transposed view.
        ("t5", 2, "interleaved", 3, (2, 1)),
        ("llama", 4, "gpipe", 2, (2, 1)),
    ]
    run_on_copies(2, functools.partial(_compile, cases), _schedules, cases)


@pytest.mark.slow
def test_schedules_with_tensor_parallel_stages() -> None:
    cases = [
        ("gpt2", 2, "1f1b", 4, (2, 2)),
        ("gpt2", 4, "dualpipev", 3, (2, 2)),
        ("mixtral", 2, "zero_bubble", 3, (2, 2)),
    ]
    run_on_copies(4, functools.partial(_compile, cases), _schedules, cases)


def _order(schedule: str) -> tuple[int, list[str], int]:
    """This rank's layers, what they ran in one step, and the most calls of them in flight."""
    pipeline, _, _ = _train("llama", 4, schedule, 1, (2, 1))
    ((compiled, _),) = pipeline._runners.items()
    trace = _Trace(compiled.codes["LlamaDecoderLayer"])
    pipeline.step(**_batch("llama"))
    stages = pipeline.stages[dist.get_rank() :: 2]
    layers = sum(path != "" for stage in stages for path in stage)
    return layers, trace.events, trace.most


def _compile_orders() -> None:
    micro = {key: value[:2] for key, value in _batch("llama").items()}
    with shared_programs():
        for schedule in ("1f1b", "zero_bubble"):  # the program of "gpipe" is that of the first
            compile_for_ranks(_model("llama", 4), micro, schedule=schedule)


def _orders() -> dict[str, Any]:
    with shared_programs(only_known=True):
        return {schedule: _order(schedule) for schedule in ("1f1b", "gpipe", "zero_bubble")}


@pytest.mark.slow
def test_weights_wait_and_activations_do_not_pile_up() -> None:
    first, last = run_on_copies(2, _compile_orders, _orders)
    for rank, results in enumerate((first, last)):
        layers, events, _ = results["zero_bubble"]
        count = Counter(events)
        assert count["backward_inputs"] == count["backward_weights"] == layers * MICROBATCHES
        assert count["backward"] == 0, "nothing runs twice"
        order = [event[9] for event in events if event.startswith("backward_")]
        # The last stage has a bubble: its gradients of weights of the first microbatch come behind
        # those of inputs of the second.
        assert rank == 0 or order[: 2 * layers] == ["i"] * (2 * layers)
    # 1F1B: as many microbatches as there are stages from here on; GPipe: all.
    for schedule, of_ranks in {"1f1b": (2, 1), "gpipe": (4, 4)}.items():
        for results, in_flight in zip((first, last), of_ranks, strict=True):
            layers, _, most = results[schedule]
            assert most == in_flight * layers


def _saved(folder: str) -> None:
    with _LIFTED, shared_programs():
        pipeline, _, _ = _train("gpt2", 2, "1f1b", 1, (2, 1))
    dcp.save(pipeline.state_dict(), checkpoint_id=folder)
    loss = pipeline.eval(**_batch("gpt2")).loss
    for parameter in pipeline.parameters():
        parameter.data.zero_()
    state = pipeline.state_dict()
    dcp.load(state, checkpoint_id=folder)
    pipeline.load_state_dict(state)
    assert pipeline.eval_loss(**_batch("gpt2")) == loss
    with pytest.raises(ArgumentError, match="which a stage of this rank holds"):
        pipeline.load_state_dict({})
    # On one device the whole model comes out of the same files.
    module = sp_compiler.compile(_model("gpt2", 2).eval(), tp=1)
    whole = module.state_dict()
    dcp.load(whole, checkpoint_id=folder, no_dist=True)
    module.load_state_dict(whole)
    mean = zoo.loss_of(module(**_batch("gpt2")))
    assert torch.isfinite(mean)
    dist.barrier()


@pytest.mark.slow
def test_checkpoint_has_every_parameter_once(tmp_path: Any) -> None:
    cases = [("gpt2", 2, "1f1b", 1, (2, 1))]
    run_on_copies(2, functools.partial(_compile, cases), _saved, str(tmp_path))


def _weighed() -> None:
    """Microbatches weighed by their tokens give the loss of the batch; rank 0 has the weights."""
    batch = _batch("llama")
    batch["labels"][:3, 4:] = -100
    with _LIFTED, shared_programs():
        # Without dropout: other masks belong to the rows of a microbatch than to those of a batch.
        truth = sp_compiler.compile(_model("llama", 2).eval(), tp=1)
        expected = zoo.loss_of(truth(**batch))
        other = _model("llama", 2).eval()
        if dist.get_rank() == 1:  # one that has not read the checkpoint
            for parameter in other.parameters():
                nn.init.ones_(parameter)
        pipeline = sp_compiler.pipeline(
            other,
            mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
            example_inputs=((), batch),
            microbatches=2,
            # A tensor of one element is a number too.
            weigh=lambda input_ids, labels: (labels[:, 1:] != -100).sum()[None],
            initial_weights="broadcast",
        )
        torch.testing.assert_close(pipeline.step(**batch), expected.double(), rtol=1e-9, atol=1e-9)
        # A microbatch without a label, whose own mean is NaN.
        batch["labels"][: len(batch["labels"]) // 2] = -100
        expected = zoo.loss_of(truth(**batch))
        torch.testing.assert_close(pipeline.step(**batch), expected.double(), rtol=1e-9, atol=1e-9)
    assert all(parameter.grad.isfinite().all() for parameter in pipeline.parameters())
    for parameter in pipeline.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(UnsupportedError, match="freeze parameters before"):
        pipeline.step(**batch)


@pytest.mark.slow
def test_losses_weighed_by_tokens() -> None:
    run_rehearsed(2, _weighed)


def _wrong_meshes() -> None:
    example: Any = ((), zoo.inputs("plain", batch=2))
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "cp"))
    data = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_shard"))
    pp = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline = functools.partial(sp_compiler.pipeline, example_inputs=example, microbatches=2)
    model = zoo.build("plain", layers=1)
    with pytest.raises(ArgumentError, match='one of them must be named "pp"'):
        pipeline(model, mesh=tp)
    with pytest.raises(UnsupportedError, match=r'"cp" of 2 ranks.*"tp" divides them'):
        pipeline(model, mesh=both)
    with pytest.raises(ArgumentError, match=r'fsdp=False, but .*"dp_shard" of 2 ranks'):
        pipeline(model, mesh=data, fsdp=False)
    with pytest.raises(ArgumentError, match=r"offload_policy.*takes mp_policy, shard_placement_fn"):
        pipeline(model, mesh=data, fsdp={"offload_policy": None})
    with pytest.raises(ArgumentError, match="weigh=3: expected a function"):
        pipeline(model, mesh=pp, weigh=3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="1 layers, too few for 2 pipeline stages"):
        pipeline(model, mesh=pp)
    other = zoo.build("plain", layers=2)
    with torch.no_grad():
        next(iter(other.parameters())).fill_(dist.get_rank())
    with pytest.raises(RankMismatchError, match=r"differ between .* initial_weights='broadcast'"):
        pipeline(other, mesh=pp)
    # Nothing was taken over.
    assert zoo.loss_of(model(**example[1])).isfinite()


@pytest.mark.slow
def test_wrong_meshes() -> None:
    run_on_ranks(2, _wrong_meshes)
