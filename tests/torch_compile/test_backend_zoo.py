"""``torch.compile(model, backend="sp_compiler")``: against eager on one and two gloo ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from sp_compiler.base.errors import RankMismatchError
from tests.helpers.dynamo import (
    compiled_by_dynamo,
    counting_net,
    loss_and_gradients,
    random_ids,
)
from tests.helpers.parity import gradient_error
from tests.helpers.ranks import run_on_ranks
from tests.models import zoo

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# The page of benchmarks/backend.py has more models, on one, two and four ranks.
_ON_ONE, _ON_TWO = ["llama", "bert", "t5", "plain"], ["gpt2", "vit", "encoder", "lora"]


def _zoo_steps(name: str, tp: int) -> dict[str, Any]:
    """Two steps of a zoo model, compiled and eager."""
    model = zoo.build(name, layers=1 if name == "t5" else 2)
    expected = copy.deepcopy(model)
    kwargs = zoo.inputs(name)
    compiled = compiled_by_dynamo(model, tp=tp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_and_gradients(model, compiled, **kwargs)
        first = loss_and_gradients(model, compiled, **kwargs)
        num_graphs = counters["stats"]["unique_graphs"]
        for _ in range(2):
            loss, grads = loss_and_gradients(model, compiled, **kwargs)
    true_loss, true_grads = loss_and_gradients(expected, expected, **kwargs)
    recompiled = counters["stats"]["unique_graphs"] - num_graphs
    torch._dynamo.reset()
    return {
        "name": name,
        "loss": abs(loss - true_loss) / abs(true_loss),
        "first": abs(first[0] - true_loss) / abs(true_loss),
        "grads": gradient_error(grads, true_grads),
        "recompiled": recompiled,
        "whole": {key: grad for key, grad in grads.items() if grad is not None},
    }


def _check_zoo(result: dict[str, Any]) -> None:
    # Models of transformers cast their norms or logits to float32.
    assert result["first"] < 1e-6
    assert result["loss"] < 1e-6
    assert result["grads"] < 1e-6
    assert result["recompiled"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", _ON_ONE)
def test_zoo_on_one_rank(name: str) -> None:
    _check_zoo(_zoo_steps(name, tp=1))


def _zoo_on_ranks(names: list[str]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    return [_zoo_steps(name, tp=2) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("names", [_ON_TWO[:2], _ON_TWO[2:]], ids="-".join)
def test_zoo_on_two_ranks(names: list[str]) -> None:
    ranks = run_on_ranks(2, _zoo_on_ranks, names)
    for first, second in zip(*ranks, strict=True):
        _check_zoo(first)
        for name, grad in first["whole"].items():
            assert torch.equal(grad, second["whole"][name]), f"{first['name']}: {name}"


def _net_on_ranks() -> dict[str, Any]:
    """All that is cheap to do in one pair of processes; each entry is checked by one test below."""
    warnings.simplefilter("ignore")
    rank, ids = dist.get_rank(), random_ids()
    model, expected = counting_net(), counting_net()
    compiled = compiled_by_dynamo(model, tp=2)
    loss, grads = loss_and_gradients(model, compiled, ids, ids)
    true_loss, true_grads = loss_and_gradients(expected, expected, ids, ids)
    result: dict[str, Any] = {
        "loss": abs(loss - true_loss),
        "grads": gradient_error(grads, true_grads),
        "buffer": int(model.num_calls),
    }
    model.eval()
    with torch.no_grad():
        result["eval"] = abs(compiled(ids, ids).item() - expected(ids, ids).item())
    model.train()
    # A new shape on one rank alone: dynamo compiles there and finds its code on the other, as the
    # labels are the ids again.
    longer = random_ids(seq=4 + 3 * rank)
    with pytest.raises(RankMismatchError, match=r"L\['ids'\](?s:.*)rank 1: .*\(2, 7\)"):
        compiled(longer, longer)
    wider = nn.Linear(8, 8 + rank, dtype=torch.float64)
    with pytest.raises(RankMismatchError, match=r"rank 1: parameter 'weight': \(9, 8\)"):
        compiled_by_dynamo(wider, tp=2)(torch.zeros(2, 8, dtype=torch.float64))
    torch._dynamo.reset()  # dynamo on rank 1 now expects sizes to change
    model.num_calls.zero_()
    result["after mismatch"] = abs(compiled(ids, ids).item() - true_loss)
    dropped = compiled_by_dynamo(counting_net(p=0.5), tp=2)
    torch.manual_seed(5 + rank)
    result["dropped"] = dropped(ids, ids).item()
    broken = counting_net(breaks=True)
    result["broken"] = gradient_error(
        loss_and_gradients(broken, compiled_by_dynamo(broken, tp=2), ids, ids)[1], true_grads
    )
    return result


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(2, _net_on_ranks)


@pytest.mark.slow
def test_whole_gradients_on_two_ranks(on_ranks: list[dict[str, Any]]) -> None:
    for result in on_ranks:
        assert result["loss"] < 1e-12
        assert result["grads"] < 1e-12
        assert result["broken"] < 1e-12
        assert result["eval"] < 1e-12
        assert result["buffer"] == 1


@pytest.mark.slow
def test_mismatched_ranks_raise_and_go_on(on_ranks: list[dict[str, Any]]) -> None:
    assert all(result["after mismatch"] < 1e-12 for result in on_ranks)


@pytest.mark.slow
def test_dropout_is_that_of_one_rank(on_ranks: list[dict[str, Any]]) -> None:
    """Ranks use the first one's seed, and the masks do not depend on their number."""
    alone = compiled_by_dynamo(counting_net(p=0.5))
    torch.manual_seed(5)
    loss = alone(random_ids(), random_ids()).item()
    assert [result["dropped"] for result in on_ranks] == pytest.approx([loss, loss], rel=1e-12)
