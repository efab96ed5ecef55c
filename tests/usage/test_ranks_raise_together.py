"""Whatever goes wrong on one rank: all ranks raise within ten seconds and say what and where."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sp_compiler
from sp_compiler import RankFailureError, RankMismatchError
from sp_compiler.runtime.recorder import Recorder
from tests.helpers.ranks import run_on_ranks
from tests.helpers.shared_programs import shared_programs
from tests.helpers.users import Net, batch, net
from tests.models import zoo

_SECONDS = 10
_TIMEOUT_S = 2.0  # of the rank that does not call


class _Stepping(nn.Module):
    """A model with a buffer."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        nn.init.ones_(self.linear.weight)
        nn.init.ones_(self.linear.bias)
        self.register_buffer("start", torch.tensor(start))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.start).square().mean()  # type: ignore[no-any-return]


def _compiled(mesh: DeviceMesh, model: nn.Module | None = None, **options: Any) -> Any:
    return sp_compiler.compile(model or net(), mesh=mesh, **options)


def _trained(mesh: DeviceMesh, rank_timeout: float | None = None) -> Any:
    """A module past the calls that are all compared."""
    module = _compiled(mesh)
    for _ in range(4):
        module(batch(4))["loss"].backward()
    if rank_timeout is not None:  # only now: to compile takes as long as a busy machine takes
        group = module._sp_state.group
        object.__setattr__(group, "timeout", timedelta(seconds=rank_timeout))
        group.collectives._timeout = group.timeout
    return module


def _break(*_: Any) -> Any:
    raise ValueError("a mistake of the user")


# Each makes rank 1 differ, or fail, and returns what then goes wrong on every rank.


def _weights(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    model = net()
    with torch.no_grad():
        model.head.weight[1, 2] += rank
    return lambda: _compiled(mesh, model)(batch(4))


def _buffers(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    return lambda: _compiled(mesh, _Stepping(rank))(batch(4))


def _values(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    return lambda: _compiled(mesh)(batch(4, seed=rank))


def _drifting_values(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    """Of more than is compared in every call: found by the comparison of every 16th."""
    module = _trained(mesh)
    x = batch(1024)
    x[-1] += rank

    def calls() -> None:
        for _ in range(16):
            module(x)["loss"].backward()

    return calls


def _validation_on_rank_0(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    """It meets a training step of the other, of the same shapes in the same mode."""
    module = _trained(mesh)
    return lambda: module(batch(4, seed=1 - rank))["loss"]


def _without_gradients(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    """Also where rank 0 validates on what rank 1 trains with."""
    module = _trained(mesh)

    def call() -> None:
        with torch.set_grad_enabled(rank == 1):
            module(batch(4))

    return call


def _shapes(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh)
    return lambda: module(batch(4 + 2 * rank))


def _dtypes(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh)
    return lambda: module(batch(4).to((torch.float64, torch.float32)[rank]))


def _arguments(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh)
    return lambda: module(batch(4), **({"scale": 2.0} if rank else {}))


def _options(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    return lambda: _compiled(mesh, recompute=("none", "full")[rank])(batch(4))


def _modes(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh)
    return lambda: module.train(rank == 0)(batch(4))


def _in_hook(hook: str, path: str, mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    """A mistake in what is registered by the method ``hook`` of the submodule at ``path``."""
    module = _trained(mesh)
    # Hooks of blocks must be on every rank.
    getattr(module.get_submodule(path), hook)(lambda *args: _break(*args) if rank else None)
    return lambda: module(batch(4))["loss"].backward()


def _before_forward(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    return _in_hook("register_forward_pre_hook", "", mesh, rank)


def _inside_forward(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    """After the first block's collectives."""
    return _in_hook("register_forward_pre_hook", "blocks.1", mesh, rank)


def _after_forward(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    return _in_hook("register_forward_hook", "", mesh, rank)


def _backward(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh)
    if rank:
        module.get_parameter("blocks.1.up.weight").register_hook(_break)

    def step() -> None:
        module(batch(4))["loss"].backward()
        module(batch(4))  # the hook comes after the last collective of that backward

    return step


def _index(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    ids = zoo.inputs("gpt2")["input_ids"]
    module = _compiled(mesh, zoo.build("gpt2", layers=1))
    for _ in range(4):
        module(ids, labels=ids)
    wrong = ids + zoo.VOCAB if rank else ids
    return lambda: module(wrong, labels=ids)


def _optimizer(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    """The user goes on after an error in a step: then the ranks' weights are different."""
    module = _trained(mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    if rank:
        optimizer._init_group = _break  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="mistake"):
            optimizer.step()
    else:
        optimizer.step()
    return lambda: module(batch(4))


def _absent(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh, rank_timeout=_TIMEOUT_S)

    def late() -> None:
        time.sleep(rank * 2 * _TIMEOUT_S)
        module(batch(4))

    return late


def _alone_in_state_dict(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    ids = zoo.inputs("gpt2")["input_ids"]
    module = _compiled(mesh, zoo.build("gpt2", layers=1))
    module(ids, labels=ids)
    return lambda: module.state_dict() if rank else module(ids, labels=ids)


def _alone_in_full_state_dict(mesh: DeviceMesh, rank: int) -> Callable[[], Any]:
    module = _trained(mesh, rank_timeout=_TIMEOUT_S)

    def alone() -> None:
        if rank == 0:
            module.full_state_dict()
        time.sleep(2 * _TIMEOUT_S)
        module(batch(4))

    return alone


_MISTAKE = "rank 1 .* failed: ValueError: a mistake of the user"
# What rank 0 raises, and what rank 1 does.
CASES: dict[Callable[..., Any], tuple[str, str]] = {
    _weights: (r"parameter 'head\.weight' differs[\s\S]*rank 0: [\s\S]*rank 1: ",) * 2,
    _buffers: (r"buffer 'start' differs[\s\S]*rank 0: [\s\S]*rank 1: ",) * 2,
    _values: (
        r"input x differs.*\n  rank 0: x: float64 \(4, 8\) on cpu, requires no grad; "
        r"first values (-?[\d.]+, ){4}\.\.\.\n  rank 1: ",
    )
    * 2,
    _drifting_values: (r"input x differs[\s\S]*rank 0: [\s\S]*rank 1: ",) * 2,
    _validation_on_rank_0: (r"input x differs[\s\S]*rank 0: [\s\S]*rank 1: ",) * 2,
    _without_gradients: (r"rank 0: records gradients: False\s*rank 1: .*True",) * 2,
    _shapes: (r"input x[\s\S]*rank 0: .*\(4, 8\)[\s\S]*rank 1: .*\(6, 8\)",) * 2,
    _dtypes: (r"input x[\s\S]*rank 0: .*float64[\s\S]*rank 1: .*float32",) * 2,
    _arguments: (r"input scale[\s\S]*rank 0: .*none[\s\S]*rank 1: .*2\.0",) * 2,
    _options: (r"rank 0: recompute: 'none'\s*rank 1: recompute: 'full'",) * 2,
    _modes: (r"rank 0: mode: train\(\)\s*rank 1: mode: eval\(\)",) * 2,
    _before_forward: (_MISTAKE, "a mistake of the user"),
    _inside_forward: (_MISTAKE, "a mistake of the user"),
    _after_forward: (_MISTAKE, "a mistake of the user"),
    _backward: (_MISTAKE, "a mistake of the user"),
    _index: ("rank 1 .* failed: IndexError: index .* for an embedding", "index .* embedding"),
    _optimizer: (r"rank 1 .* failed: .*AdamW\.step\(\)", r"rank 1 .* failed: .*AdamW\.step\(\)"),
    _absent: ("rank 0 calls the module, but rank 1 does not after 0:00:02", "rank 0 .* failed"),
    _alone_in_state_dict: (r"rank 0 calls the module, rank 1 calls state_dict\(\)",) * 2,
    _alone_in_full_state_dict: (
        r"rank 0 calls full_state_dict\(\), but rank 1 does not",
        "rank 0 .* failed",
    ),
}


def _run() -> dict[str, tuple[str, float]]:
    """Text of what this rank raised, and after how long, by case; each in a group of its own."""
    with shared_programs():
        return _run_each()


def _run_each() -> dict[str, tuple[str, float]]:
    rank, results = dist.get_rank(), {}
    for case in CASES:
        # A rank that stopped amid collectives leaves a group that nobody can use.
        group = dist.new_group(list(range(dist.get_world_size())))
        fails = case(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), rank)
        dist.barrier()
        start = time.monotonic()
        try:
            fails()
            text = "nothing"
        except (ValueError, IndexError, RankFailureError, RankMismatchError) as error:
            text = str(error)
        results[case.__name__] = text, time.monotonic() - start
        dist.barrier()
    return results


@pytest.fixture(scope="module")
def all_ranks() -> list[dict[str, tuple[str, float]]]:
    return run_on_ranks(2, _run)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises(all_ranks: list[dict[str, Any]], case: Callable[..., Any]) -> None:
    for said, results in zip(CASES[case], all_ranks, strict=True):
        text, seconds = results[case.__name__]
        assert re.search(said, text), text
        assert seconds < _SECONDS


def _broadcast() -> bool:
    """Ranks that start differently begin with rank 0's weights where that is asked for."""
    model = net()
    with torch.no_grad():
        model.head.weight.add_(dist.get_rank())
    module = sp_compiler.compile(model, tp=2, initial_weights="broadcast")
    module(batch(4))["loss"].backward()
    return torch.equal(module.get_parameter("head.weight").full_tensor(), net().head.weight)  # type: ignore[attr-defined]


def _recovering() -> int:
    """The ranks can go on if nothing was sent yet, as often as they like."""
    module = sp_compiler.compile(net(), tp=2)
    rank = dist.get_rank()
    for _ in range(3):
        with pytest.raises(RankMismatchError, match="input x"):
            module(batch(4 + 2 * rank))
        with pytest.raises(sp_compiler.CaptureError):
            module(batch(4)[..., :5])
        module(batch(4))["loss"].backward()
    return rank


def _gone() -> None:
    """The process of rank 1 ends without a word."""
    module = sp_compiler.compile(net(), tp=2)
    module(batch(4))
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RankFailureError, match="a rank of the tensor-parallel group is gone"):
        module(batch(4))


def _without_host_collectives() -> bool:
    """As where the group has a backend for an accelerator alone: nothing waits on the host."""
    module = sp_compiler.compile(net(), tp=2)
    agreement = module._sp_state.agreement
    agreement.every_call = False
    rank = dist.get_rank()
    for _ in range(2):
        module(batch(4))
    module(batch(4, seed=rank))
    with pytest.raises(RankMismatchError, match="input x differs"):  # of the call before
        module(batch(4))
    return True


def _counted() -> bool:
    """Dispatch modes see the collectives of the plan."""
    module = sp_compiler.compile(net(), tp=2)
    module(batch(4))
    with Recorder() as forward:
        loss = module(batch(4))["loss"]
    with Recorder() as backward:
        loss.backward()
    planned = {item.kind.replace("_", "-"): item.count for item in module.plan.collectives}
    seen = forward.collectives + backward.collectives
    return all(seen[kind] == planned[kind] for kind in ("all-gather", "reduce-scatter"))


def _two() -> list[Any]:
    return [_broadcast(), _recovering(), _without_host_collectives(), _counted()]


@pytest.mark.slow
def test_ranks_begin_and_go_on() -> None:
    assert run_on_ranks(2, _two) == [[True, rank, True, True] for rank in range(2)]


@pytest.mark.slow
def test_a_process_that_ends() -> None:
    with pytest.raises(FileNotFoundError, match=r"1\.pt"):  # of rank 1 alone: rank 0 was content
        run_on_ranks(2, _gone)


def test_options() -> None:
    for name, value in (
        ("initial_weights", "keep"),
        ("rank_timeout", "5 s"),
        ("rank_timeout", True),
        ("rank_timeout", float("inf")),
    ):
        with pytest.raises(sp_compiler.ArgumentError, match=f"{name}="):
            sp_compiler.compile(Net(), tp=1, **{name: value})  # type: ignore[arg-type]
