"""Ranks whose compilers do not agree: none waits for ever, and all run the same; and pipelines."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import sp_compiler
from tests.helpers.calls_in_a_row import IDS, INPUTS, gpt, graphs_interpreted
from tests.helpers.inductor import own_cache
from tests.helpers.ranks import run_on_ranks
from tests.helpers.rehearsal import run_rehearsed

SAID = "runs uncompiled"


class Net(nn.Module):
    """A block with a parameter that is replicated, whose gradient depends on every kernel.

    A step whose gradients come from the loss alone does not run all kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.dropout(self.down(torch.sin(self.up(x * self.scale)) * 2 + 1), 0.5)
        return y.square().mean(), y


def _step(module: nn.Module, from_loss: bool = True) -> dict[str, Any]:
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.manual_seed(7)  # of the masks
    module.zero_grad()
    loss, y = module(x)
    (loss if from_loss else loss + y.exp().mean()).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    full = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in grads.items()}
    return {"loss": loss.detach(), **full}


def _notes(module: Any) -> list[str]:
    return [note for note in module.plan.notes if SAID in note]


def _steps(folder: str) -> list[dict[str, Any]]:
    """Eager code; kernels whose compiler is killed on rank 1; kernels that rank 1 has to make."""
    rank, results = dist.get_rank(), []
    torch.manual_seed(0)
    model = Net().double()
    killed = Path(folder, f"compiler-{rank}")
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    for backend, compiler in (("eager", None), ("inductor", killed), ("inductor", None)):
        module: Any = sp_compiler.compile(copy.deepcopy(model), tp=2, backend=backend)
        counters.clear()
        broken: dict[str, Any] = {"cpp.cxx": (str(compiler),)} if compiler and rank else {}
        # Of the headers once for all that a rank compiles.
        broken = broken or {"cpp_cache_precompile_headers": True}
        # Rank 0 finds in the last step what it has compiled for the step before.
        with own_cache(Path(folder, f"cache-{rank}")), config.patch(broken):
            time.sleep(1.0 * rank)
            step = _step(module)
            hits, notes = counters["inductor"]["fxgraph_cache_hit"], _notes(module)
            both = _step(module, from_loss=False)
        late = _notes(module)[len(notes) :]
        results.append({"steps": (step, both), "hits": hits, "notes": notes, "late": late})
    return results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_killed_compiler_and_a_cold_cache_on_one_rank(tmp_path: Path) -> None:
    ranks = run_on_ranks(2, _steps, str(tmp_path))
    eager, killed, cold = ([rank[at] for rank in ranks] for at in range(3))
    for found in (*killed, *cold):
        for step, expected in zip(found["steps"], eager[0]["steps"], strict=True):
            for name, value in expected.items():
                torch.testing.assert_close(step[name], value, rtol=1e-12, atol=1e-14)
    # On both alike, though on rank 0 everything was compiled.
    for when, function in (("notes", ".loss_backward_"), ("late", ".backward_")):
        assert killed[0][when] == killed[1][when] != []
        assert all("on all ranks: rank 1: " in note for note in killed[0][when])
        # What the loss alone does not need is compiled when it is called.
        assert any(function in note for note in killed[0][when])
    assert not any(".backward_" in note for note in killed[0]["notes"])
    for each in cold:
        assert not each["notes"] + each["late"]
    assert cold[0]["hits"] == len(killed[0]["notes"])
    assert cold[1]["hits"] == 0
    for first, second in (killed, cold):
        for one, other in zip(first["steps"], second["steps"], strict=True):
            assert torch.equal(one["scale"], other["scale"])


def _delayed_weights() -> tuple[int, str]:
    """Number of functions for Inductor that compute weight gradients, and what does not run by it;
    gradients of both backends are the same."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    grads = []
    for schedule, backend in (("1f1b", "eager"), ("zero_bubble", "inductor")):
        torch.manual_seed(0)
        pipeline = sp_compiler.pipeline(
            gpt(), mesh=mesh, example_inputs=((), INPUTS), microbatches=2,
            schedule=schedule, backend=backend,
        )  # fmt: skip
        torch.manual_seed(2)  # of the masks
        pipeline.step(input_ids=IDS, labels=IDS)
        grads.append({name: each.grad for name, each in pipeline.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-14)
    return pipeline.code.count("def backward_weights_"), "\n".join(_notes(pipeline))


@pytest.mark.slow
def test_a_pipeline_that_delays_weight_gradients() -> None:
    with graphs_interpreted():
        ranks = run_rehearsed(2, _delayed_weights)
    for compiled, notes in ranks:
        assert compiled > 0
        assert not notes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Labelled(nn.Module):
    """Two inputs whose sizes are found to be equal only where the loss compares them.

    Which of the two symbols of a size stays depends on the inputs' names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(26, 16), nn.Linear(16, 26)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def _two_lengths(cache: str) -> tuple[list[str], float]:
    """What does not run by Inductor, and the largest difference of the loss from eager code."""
    torch.manual_seed(0)
    model = Labelled().double()
    eager = copy.deepcopy(model)
    errors = []
    with own_cache(Path(cache)):
        module: Any = sp_compiler.compile(model, tp=2, backend="inductor")
        for length in (8, 9):
            ids = torch.arange(2 * length).view(2, length)
            loss = module(ids, ids.clone())
            loss.backward()
            errors.append(float((loss - eager(ids, ids)).abs().detach()))
    return [note for note in module.plan.notes if SAID in note], max(errors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_sizes_that_are_found_to_be_equal_are_compiled(tmp_path: Path) -> None:
    for notes, error in run_on_ranks(2, _two_lengths, str(tmp_path)):
        assert notes == []
        assert error < 1e-12
