"""Training on a grid of data-parallel and tensor-parallel ranks, beside the same on one device."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import sp_compiler
from sp_compiler.ops.counter import call_seed, draw_seed
from tests.models import architectures, zoo

Batch = dict[str, Tensor]
_LENGTH = 8
MAX_NORM = 0.3
_NORMS = (2.0, float("inf"), 3.0)


def mesh(**axes: int) -> DeviceMesh:
    """The mesh of a spawned rank, whose warnings nobody reads from here on."""
    warnings.simplefilter("ignore")
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


@dataclass(frozen=True)
class Case:
    """A model in float64 and its batches."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    dropout: bool = False


def case(name: str, parts: int, *, dropout: float = 0.0) -> Case:
    """``name`` of the zoo or of the table of architectures; batches of two samples per part."""
    if name in zoo.names():
        fields: dict[str, Any] = (
            {"vocab_size": 131} if name == "gpt2" else {}
        )  # which no number of ranks divides
        build = lambda: zoo.build(name, dropout=dropout, layers=2, **fields).double().train()  # noqa: E731
        inputs = lambda seed: zoo.inputs(name, batch=2 * parts, seq=_LENGTH, seed=seed)  # noqa: E731
        return Case(build, lambda steps: [inputs(seed) for seed in range(steps)], dropout > 0)
    size = architectures.size("dividing", 2)
    table = architectures.TABLE[name]
    big = copy.copy(size)
    object.__setattr__(big, "batch", 2 * parts)
    make = lambda seed: table.inputs(big, torch.Generator().manual_seed(seed))  # noqa: E731

    def build_row() -> nn.Module:
        model = architectures.build(name, size)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # eager has no other in float64
        return model

    return Case(build_row, lambda steps: [make(seed) for seed in range(steps)])


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Casts to float32 in the models' own code go to float64, on both sides of a comparison."""
    to, softmax = Tensor.to, nn.functional.softmax

    def up(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def lifted_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(self, *map(up, args), **{name: up(value) for name, value in kwargs.items()})

    def lifted_softmax(*args: Any, **kwargs: Any) -> Tensor:
        return softmax(*args, **{name: up(value) for name, value in kwargs.items()})

    with (
        mock.patch.object(Tensor, "to", lifted_to),
        mock.patch.object(Tensor, "float", Tensor.double),
        mock.patch.object(nn.functional, "softmax", lifted_softmax),
        architectures.float64(),
    ):
        yield


def split(batch: Mapping[str, Any], parts: int) -> list[dict[str, Any]]:
    """The batches of the data-parallel ranks."""
    chunks = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: value[part] for name, value in chunks.items()} for part in range(parts)]


@dataclass
class Follower:
    """One model that is trained: by a grid, or on one device, its batch in parts."""

    module: Any
    optimizer: torch.optim.Optimizer

    @staticmethod
    def of(module: Any) -> Follower:
        # eps well above rounding: else Adam turns rounding errors into steps.
        return Follower(module, torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-6))

    def step(self, norm: Tensor) -> float:
        """The optimizer's, after clipping."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def truth_of(case: Case) -> Follower:
    """The model on one device; compiled too where dropout is on, for it draws other numbers."""
    model = case.build()
    return Follower.of(sp_compiler.compile(model, tp=1) if case.dropout else model)


def truth_step(
    truth: Follower, batch: Batch, parts: int, accumulate: int, p: float
) -> tuple[float, float]:
    """Loss and norm of a step on the mean over parts and microbatches."""
    total = 0.0
    draws = [draw_seed() for _ in range(accumulate)]  # one a microbatch, as every rank draws
    for part, own in enumerate(split(batch, parts)):
        for draw, micro in zip(draws, split(own, accumulate), strict=True):
            seed = call_seed(draw, part) if part else draw
            with mock.patch("sp_compiler.runtime.group.draw_seed", lambda seed=seed: seed):
                loss = zoo.loss_of(truth.module(**micro)) / (parts * accumulate)
            loss.backward()
            total += loss.item()
    return total, truth.step(nn.utils.clip_grad_norm_(truth.module.parameters(), MAX_NORM, p))


def grid_step(
    one: Follower, batch: Batch, mesh: DeviceMesh, accumulate: int, p: float
) -> tuple[float, float]:
    """The same on this rank's part of the batch; the loss is the mean over the grid's parts."""
    part, parts = sp_compiler.data_shard(mesh)
    total = torch.zeros(())
    micros = split(split(batch, parts)[part], accumulate)
    for index, micro in enumerate(micros):
        last = index == accumulate - 1
        with contextlib.nullcontext() if last else one.module.no_sync():
            loss = zoo.loss_of(one.module(**micro)) / accumulate
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    norm = sp_compiler.clip_grad_norm_(one.module, MAX_NORM, p)
    return float(total / dist.get_world_size()), one.step(norm)


def follow(
    mesh: DeviceMesh,
    chosen: Case,
    steps: int,
    accumulate: int = 1,
    prepare: Callable[[Any, DeviceMesh], None] | None = None,
    **options: Any,
) -> tuple[dict[str, float], Follower, Follower]:
    """Train both; the largest differences of losses, norms and parameters, and what was trained.

    Norms are of another order in each step; ``prepare(module, mesh)`` runs before the optimizer is
    made.
    """
    _, parts = sp_compiler.data_shard(mesh)
    batches = chosen.batches(steps)
    part, _ = sp_compiler.data_shard(mesh)
    example = split(split(batches[0], parts)[part], accumulate)[0]
    module: Any = sp_compiler.compile(
        chosen.build(), mesh=mesh, example_inputs=((), example), **options
    )
    if prepare is not None:
        prepare(module, mesh)
    one, truth = Follower.of(module), truth_of(chosen)
    worst = {"loss": 0.0, "norm": 0.0}
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        p = _NORMS[step % len(_NORMS)]
        ours = grid_step(one, batch, mesh, accumulate, p)
        torch.manual_seed(step)
        theirs = truth_step(truth, batch, parts, accumulate, p)
        for kind, first, second in zip(worst, ours, theirs, strict=True):
            worst[kind] = max(worst[kind], abs(first - second) / abs(second))
    worst["parameters"] = parameter_error(one.module, truth.module)
    return worst, one, truth


def follow_pipeline(
    mesh: DeviceMesh, chosen: Case, steps: int, microbatches: int, **options: Any
) -> tuple[dict[str, float], Any, Follower]:
    """As :func:`follow`, for a pipeline."""
    part, parts = sp_compiler.data_shard(mesh)
    batches = chosen.batches(steps)
    pipeline: Any = sp_compiler.pipeline(
        chosen.build(),
        mesh=mesh,
        example_inputs=((), split(batches[0], parts)[part]),
        microbatches=microbatches,
        **options,
    )
    one, truth = Follower.of(pipeline), truth_of(chosen)
    worst = {"loss": 0.0, "norm": 0.0}
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        p = _NORMS[step % len(_NORMS)]
        loss = pipeline.step(**split(batch, parts)[part])
        dist.all_reduce(loss)
        norm = sp_compiler.clip_grad_norm_(pipeline, MAX_NORM, p)
        ours = float(loss / dist.get_world_size()), one.step(norm)
        torch.manual_seed(step)
        theirs = truth_step(truth, batch, parts, microbatches, p)
        for kind, first, second in zip(worst, ours, theirs, strict=True):
            worst[kind] = max(worst[kind], abs(first - second) / abs(second))
    true = truth.module.state_dict()
    state = pipeline.state_dict()
    worst["parameters"] = max(
        (whole(value) - true[name]).abs().max().item() for name, value in state.items()
    )
    return worst, pipeline, truth


def parameter_error(module: Any, truth: Any) -> float:
    """The largest difference of a parameter, on every rank."""
    state = {name: whole(value) for name, value in module.state_dict().items()}
    true = truth.state_dict()
    assert state.keys() == true.keys()
    return max((state[name] - value).abs().max().item() for name, value in true.items())


def whole(value: Any) -> Tensor:
    """The global tensor."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def local(value: Tensor) -> Tensor:
    """This rank's part."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


class CollectivesByAxis(TorchDispatchMode):
    """Counts collectives by the axis of a mesh that they run over, and their kind."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        self._axes = {
            tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in names
        }
        self.counts: Counter[tuple[str, str]] = Counter()
        self.elements: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, _, name = func.name().partition("::")
        if namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            kind = name.replace("_into_tensor", "").replace("_tensor", "").strip("_.")
            kind = (
                "".join(c for c in kind if c.isalpha()).removesuffix("base").removesuffix("single")
            )
            leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
            axis = next((a for leaf in leaves if (a := self._axis(leaf))), "?")
            self.counts[axis, kind] += 1
            sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
            self.elements[axis, kind] += max(sizes)
        return func(*args, **(kwargs or {}))

    def _axis(self, leaf: Any) -> str:
        try:
            if isinstance(leaf, str):
                group = dist.distributed_c10d._resolve_process_group(leaf)  # type: ignore[arg-type]
            elif isinstance(leaf, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(leaf)
            else:
                return ""
        except RuntimeError:  # what to do with numbers: "sum"
            return ""
        return self._axes.get(tuple(dist.get_process_group_ranks(group)), "")
