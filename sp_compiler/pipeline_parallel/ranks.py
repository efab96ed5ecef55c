"""Communication between the ranks of a mesh with stages, other than activations and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from sp_compiler.base.errors import ArgumentError
from sp_compiler.grid.initial_weights import agree_on_weights
from sp_compiler.grid.watched_group import WatchedGroup, watched
from sp_compiler.module.calls import weights_of
from sp_compiler.module.state import ModuleState
from sp_compiler.module.weights import distinct, keeps_full_state, kept_full
from sp_compiler.ops.counter import call_seed, draw_seed
from sp_compiler.pipeline_parallel.axes import PipelineAxis
from sp_compiler.runtime.group import broadcast, on_device
from sp_compiler.runtime.keys.call_key import call_key
from sp_compiler.runtime.rank_checks import RankAgreement

Weigh = Callable[..., Tensor | float]
"""Function from the inputs of a microbatch to the weight of its loss."""


class StageRanks:
    """This rank and those of all axes of the mesh.

    Args:
        state: state of the module, with the axis "tp" and the data axes.
        axis: the mesh axis of the pipeline.
    """

    def __init__(self, state: ModuleState, axis: PipelineAxis) -> None:
        self._state = state
        self._axis = axis
        self._agreement = RankAgreement(axis.watched, "pipeline", state.options)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Context whose errors raise on all ranks of the mesh: each rank reports them along its own
        axes."""
        # The module's group last: it raises if its data axes are unusable.
        with self._axis.watched.reporting(), self._state.group.reporting():
            yield

    def agree(
        self, leaves: list[Any], structure: pytree.TreeSpec, names: Callable[[], list[str]]
    ) -> None:
        """Compare a call and its inputs with those of the other stages.

        ``names`` returns the names of ``leaves``; called only if something differs.

        Raises:
            RankMismatchError: they differ, so that stages would work on tokens and labels of
                different batches.
        """
        # Without parameters and buffers, which differ between stages, and without attributes,
        # some of which FSDP sets on the modules that it manages.
        modules, loss_only = self._state.modules.values(), self._state.loss_only
        key = call_key(modules, (), (), leaves, structure, loss_only=loss_only)
        self._agreement.begin_call(key, leaves, names, compiled=True)
        if self._agreement.every_call:
            self._agreement.settle()  # before anything is sent
        # Hooks of this stage's blocks: its tensor-parallel ranks gather values for them.
        if hooks := self._state.layout.hooks():
            self._state.agreement.require_equal("runs hooks of blocks", {"hooks": hooks})

    def require_all(self, purpose: str) -> None:
        """Raise an error unless all stages, and all ranks of "tp", come with the same ``purpose``.

        Raises:
            RankMismatchError: a rank calls something else, or does not arrive.
        """
        if self._axis.size > 1:
            self._agreement.require_equal(purpose, {})
        self._state.agreement.require_equal(purpose, {})

    def agree_on_weights(self) -> None:
        """Compare parameters and buffers with those of the other stages, or take the first rank's.

        Called while each rank still has the full model. Otherwise a stage initialized from other
        files, or with another seed, than the others would be trained as if it belonged to them.

        Raises:
            RankMismatchError: they differ, with their names.
        """
        if self._axis.size == 1:
            return
        agree_on_weights(
            weights_of(self._state),
            self._agreement.require_same_model,
            partial(broadcast, group=self._axis.watched),
            broadcasts=self._state.initial_weights == "broadcast",
        )

    def meet_over_data(self) -> None:
        """Wait for the other parts of the data, and check whether they failed.

        Does nothing on accelerators, where nothing waits on the host.
        """
        if self._state.device().type != "cpu":
            return
        data = self._state.group.data
        for name in data.names:
            assert data.mesh is not None
            group = watched(data.mesh.get_group(name))
            if isinstance(group, WatchedGroup):
                group.meet()

    def seeds(self, count: int) -> list[Tensor]:
        """Draw a seed for each of ``count`` microbatches, as consecutive forwards would."""
        # On every rank, though one rank's are used: all generators stay in the same state.
        drawn = [on_device(draw_seed(), self._state.device()) for _ in range(count)]
        seeds = torch.stack(drawn)
        if self._state.group.process_group is not None:
            broadcast(seeds, self._state.group)
        if self._axis.size > 1:
            broadcast(seeds, self._axis.watched)
        part = self._state.group.data.rank
        # Each part of the data has its own masks, as in forward_seed.
        return [call_seed(seed, part) if part else seed for seed in seeds]

    def weights(
        self, weigh: Weigh | None, parts: Sequence[Sequence[Any]], structure: pytree.TreeSpec
    ) -> list[Tensor | float]:
        """Return the weight of each microbatch's loss.

        The mean of the weighted sums over the parts of the data is the loss of the batch.

        Args:
            weigh: function from a microbatch's inputs to its weight; ``None`` for equal weights.
            parts: flattened inputs of each microbatch.
            structure: pytree structure of the arguments.
        """
        if weigh is None:
            return [1 / len(parts)] * len(parts)
        calls = [pytree.tree_unflatten(part, structure) for part in parts]
        weights = [_number(weigh(*args, **kwargs)) for args, kwargs in calls]
        total = torch.stack(weights).sum().to(self._state.device())
        data = self._state.group.data
        for name in data.names:
            assert data.mesh is not None
            dist.all_reduce(total, group=watched(data.mesh.get_group(name)))
        # Gradients are averaged over the parts of the data, which would divide again.
        return [weight / total.to(weight) * data.size for weight in weights]

    def on_first(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all stages, unsharded, on the CPU of the first rank of the mesh, and
        ``{}`` on other ranks; a collective call.

        Other ranks hold one unsharded tensor at a time.

        Args:
            state: what this rank's stages hold, made with ``keep_vars``.
        """
        axis, device = self._axis, self._state.device()
        # The ranks of all stages that keep tensors are one pipeline.
        keeps = keeps_full_state(self._state.group)
        values = distinct(state)
        own = {names: _described(value) for names, value in values.items()}
        ranks: list[dict[tuple[str, ...], Any]] = [{} for _ in range(axis.size)]
        dist.all_gather_object(ranks, own, group=axis.group)
        # Of tied weights, and of a buffer that no stage writes, several ranks have the same values.
        first = {names: rank for rank in reversed(range(axis.size)) for names in ranks[rank]}
        receives = keeps and axis.rank == 0
        result: dict[str, Any] = {}
        for names, value in values.items():
            if first[names] != axis.rank:
                continue
            full = kept_full(value, keeps=keeps)
            if receives:
                result.update(dict.fromkeys(names, full))
            elif isinstance(full, Tensor):
                # As bytes: backends lack some dtypes.
                sent = full.to(device).contiguous().view(-1).view(torch.uint8)
                dist.send(sent, group=axis.group, group_dst=0)
        for rank in range(1, axis.size) if receives else ():
            for names, like in ranks[rank].items():
                if first[names] == rank:
                    result.update(dict.fromkeys(names, _received(like, rank, axis, device)))
        return result

    def total(self, losses: Iterable[Tensor]) -> Tensor:
        """Return the sum of ``losses``, which the last stage has, on every rank of the pipeline."""
        # In 64 bits, since the other ranks do not know the dtype of the loss.
        total = torch.zeros((), dtype=torch.float64, device=self._state.device())
        for loss in losses:
            total += loss
        # The other ranks add 0.
        return self._axis.watched.communicator.all_reduce(total, "P", "I")


def _described(value: Any) -> Any:
    """Return a tensor's shape and dtype, as a tensor without data; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _received(like: Any, rank: int, axis: PipelineAxis, device: torch.device) -> Any:
    if not isinstance(like, Tensor):
        return like
    received = torch.empty(like.nbytes, dtype=torch.uint8, device=device)
    dist.recv(received, group=axis.group, group_src=rank)
    return received.cpu().view(like.dtype).view(like.shape)


def _number(weight: Any) -> Tensor:
    """Return what ``weigh`` returned for a microbatch, as a 0-dim tensor.

    Raises:
        ArgumentError: it is not one number.
    """
    if isinstance(weight, Tensor | float | int):
        if not isinstance(weight, Tensor):
            weight = torch.tensor(weight, dtype=torch.float64, device="cpu")
        number = weight.to(torch.float64)
        if number.numel() == 1:
            return number.detach().reshape(())
    what = (
        f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    )
    raise ArgumentError(
        f"weigh= returned {what} for a microbatch: expected one number, the weight of its loss, "
        "such as (labels != -100).sum()"
    )
