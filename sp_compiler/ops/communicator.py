"""The object ``tp`` of the generated code: this rank, its group, and typed collectives.

The kernels of custom operators are methods of it too, added by :mod:`sp_compiler.ops.registry`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sp_compiler.base.placement import Placement
from sp_compiler.base.shards import first_pieces, padded, without_padding
from sp_compiler.ops.gpu.id_checks import IdChecks
from sp_compiler.ops.gpu.peer_memory import ranks_read_each_other

_c10d = torch.ops._c10d_functional
# The dispatcher's own functions: torch's Python wrapper around each takes a tenth of the time that
# a collective takes to start.
_all_gather, _reduce_scatter, _all_reduce, _all_reduce_in_place, _all_to_all, _wait = (
    packet.default._op
    for packet in (
        _c10d.all_gather_into_tensor,
        _c10d.reduce_scatter_tensor,
        _c10d.all_reduce,
        _c10d.all_reduce_,
        _c10d.all_to_all_single,
        _c10d.wait_tensor,
    )
)


class Collectives(Protocol):
    """Starts collectives of contiguous tensors on dim 0; each method returns a function that waits
    for the result."""

    def all_gather(self, x: Tensor, world_size: int) -> Callable[[], Tensor]: ...

    def reduce_scatter(self, x: Tensor, world_size: int) -> Callable[[], Tensor]: ...

    def all_reduce(self, x: Tensor, op: str, in_place: bool = False) -> Callable[[], Tensor]:
        """``in_place``: whether ``x`` becomes the result."""
        ...


class Exchange(Protocol):
    """Starts an exchange of rows like :class:`Collectives`."""

    def all_to_all(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], Tensor]: ...


class FunctionalCollectives:
    """Torch's functional collectives, which simulated ranks and every backend support."""

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name

    def all_gather(self, x: Tensor, world_size: int) -> Callable[[], Tensor]:
        result = _all_gather(x, world_size, self._group_name)
        return functools.partial(_wait, result)

    def reduce_scatter(self, x: Tensor, world_size: int) -> Callable[[], Tensor]:
        result = _reduce_scatter(x, "sum", world_size, self._group_name)
        return functools.partial(_wait, result)

    def all_reduce(self, x: Tensor, op: str, in_place: bool = False) -> Callable[[], Tensor]:
        result = (_all_reduce_in_place if in_place else _all_reduce)(x, op, self._group_name)
        return functools.partial(_wait, result)

    def all_to_all(
        self, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Callable[[], Tensor]:
        result = _all_to_all(x, list(received), list(sent), self._group_name)
        return functools.partial(_wait, result)


class Pending:
    """A collective in flight, which keeps its operand alive until it is complete.

    Args:
        arrive: function that waits for the result and returns it.
        sent: its operand.
        finish: function applied to the result when it is complete.
    """

    __slots__ = ("_arrive", "_finish", "_sent")

    def __init__(
        self,
        arrive: Callable[[], Tensor],
        sent: Tensor,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._arrive = arrive
        self._sent = sent
        self._finish = finish

    def wait(self) -> Tensor:
        """Wait for the result and return it; to be called once."""
        arrived = self._arrive()
        del self._arrive, self._sent  # this object may live longer
        return arrived if self._finish is None else self._finish(arrived)


class ExpertRanks:
    """The ranks of the axis "ep", which have different batches and each a part of the experts.

    Args:
        group: their process group.
        exchange: exchanges rows in the group.
    """

    def __init__(self, group: ProcessGroup, exchange: Exchange) -> None:
        self._exchange = exchange
        self.rank = group.rank()
        self.world_size = group.size()

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first ``sent[0]`` of contiguous ``rows`` to rank 0, the next to rank 1, and so
        on; return what arrives, by rank."""
        return self._exchange.all_to_all(rows, sent, received)()


class Communicator:
    """Typed collectives on one rank's tensors, and the kernels of our operators.

    Whatever a step calls often runs below autograd, as regions do: torch differentiates collectives
    in Python, which takes as long as starting one.

    Args:
        group: the tensor-parallel process group; ``None`` when ``world_size`` is 1.
        rank: this rank in the group: an int, or a 0-dim int64 tensor that differs by rank if
            several ranks are simulated in one process.
        world_size: number of ranks.
        collectives: how collectives run; by default as torch's functional ones.
        experts: the ranks that divide the experts; ``None`` if every rank has all of them.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        rank: int | Tensor,
        world_size: int,
        collectives: Collectives | None = None,
        experts: ExpertRanks | None = None,
    ) -> None:
        name = group.group_name if group is not None else ""
        self._group = group
        self._ranks_read_each_other: bool | None = None
        self._collectives = collectives or FunctionalCollectives(name)
        self.rank = rank
        self.world_size = world_size
        self.experts = experts
        self.id_checks = IdChecks()

    def symmetric_memory_group(self, x: Tensor) -> str | None:
        """Return the name under which torch's fused matmuls know the ranks that have parts of
        ``x``; ``None`` if these cannot read each other's memory.

        The first call for tensors of the device is a collective.
        """
        if not x.is_cuda or self._group is None:
            return None
        if self._ranks_read_each_other is None:
            # By backend: an emulated group accepts tensors of the device too, but has one rank.
            is_nccl = self._group._get_backend(x.device).name() == "nccl"
            self._ranks_read_each_other = is_nccl and ranks_read_each_other(self._group, x.device)
        return self._group.group_name if self._ranks_read_each_other else None

    def on_each_rank(
        self,
        function: Callable[[int | Tensor, Sequence[Any]], Sequence[Any]],
        values: Sequence[Any],
    ) -> Sequence[Any]:
        """Call ``function(rank, values)``, which takes plain tensors only, once per rank."""
        return function(self.rank, values)

    # Conversions between placements. ``src`` and ``dst`` are placement texts.

    def all_gather(self, x: Tensor, src: str, dst: str) -> Tensor:
        """S(dim) -> R or I: every rank's part, in rank order; contiguous."""
        # Not even a copy on one rank: the same code serves every tp, and is free at 1.
        return x if self.world_size == 1 else self.start_all_gather(x, src, dst).wait()

    def reduce_scatter(self, x: Tensor, src: str, dst: str) -> Tensor:
        """P -> S(dim): this rank's part of the sum over ranks."""
        return x if self.world_size == 1 else self.start_reduce_scatter(x, src, dst).wait()

    def all_reduce(self, x: Tensor, src: str, dst: str) -> Tensor:
        """P -> I or R: the sum over ranks."""
        return self.reduce(x, "sum")

    def all_reduce_(self, x: Tensor, src: str, dst: str) -> Tensor:
        """:meth:`all_reduce` into the memory of ``x``, if that is contiguous."""
        return x if self.world_size == 1 else self.start_all_reduce_(x, src, dst).wait()

    def start_all_gather(self, x: Tensor, src: str, dst: str) -> Pending:
        """:meth:`all_gather` of more than one rank, started and not yet waited for."""
        # Held until the result is there: the transfer reads it while its caller continues.
        sent = x.contiguous()
        ranks = self._collectives.all_gather(sent, self.world_size)
        # The collective concatenates the parts on dim 0, which for rows is the result: no copy.
        if _is_rows(src, self.world_size):
            return Pending(ranks, sent)
        joined = functools.partial(_joined, Placement.parse(src), self.world_size)
        return Pending(ranks, sent, joined)

    def start_reduce_scatter(self, x: Tensor, src: str, dst: str) -> Pending:
        """:meth:`reduce_scatter` of more than one rank, started and not yet waited for."""
        # The collective splits only dim 0.
        is_rows = _is_rows(dst, self.world_size)
        ranks = x if is_rows else _apart(Placement.parse(dst), self.world_size, x)
        ranks = ranks.contiguous()
        return Pending(self._collectives.reduce_scatter(ranks, self.world_size), ranks)

    def start_all_reduce(self, x: Tensor, src: str, dst: str, op: str = "sum") -> Pending:
        """:meth:`all_reduce` of more than one rank, started and not yet waited for."""
        return Pending(self._collectives.all_reduce(x.contiguous(), op), x)

    def start_all_reduce_(self, x: Tensor, src: str, dst: str) -> Pending:
        """:meth:`all_reduce_` of more than one rank, started and not yet waited for."""
        return Pending(self._collectives.all_reduce(x.contiguous(), "sum", in_place=True), x)

    def shard(self, x: Tensor, src: str, dst: str) -> Tensor:
        """R or I -> S(dim): a copy of this rank's part, so that ``x`` can be freed."""
        # A view would keep the global tensor in memory, from which only this part is needed.
        part = self.part_of(x, Placement.parse(dst))
        return part.clone(memory_format=torch.contiguous_format)

    def part_of(self, x: Tensor, target: Placement) -> Tensor:
        """Return this rank's part of a global tensor: a view of it, unless ``target`` has several
        segments or padding."""
        full = padded(x, target, self.world_size)
        segments = target.padded_segments(self.world_size) or (full.shape[target.dim],)
        parts = [self._rank_slice(each, target.dim) for each in full.split(segments, target.dim)]
        if len(parts) > 1:
            return torch.cat(parts, target.dim)
        # A view of the padded copy would keep all of it.
        return parts[0] if full is x else parts[0].clone()

    def zero_pad_to_partial(self, x: Tensor, src: str, dst: str) -> Tensor:
        """S(dim) -> P: this rank's part in place, zeros elsewhere (the gradient of R -> S)."""
        source = Placement.parse(src)
        size = x.shape[source.dim]
        parts = x.unsqueeze(source.dim)
        # By comparison, not by an index: the rank of simulated ranks is a tensor.
        is_own = torch.arange(self.world_size, device=x.device) == self.rank
        # To broadcast along the dim of ranks, which is before the sharded one.
        is_own = is_own.view(-1, *[1] * (x.dim() - source.dim))
        ranks = torch.where(is_own, parts, torch.zeros((), dtype=x.dtype, device=x.device))
        ranks = ranks.flatten(source.dim, source.dim + 1)
        assert ranks.shape[source.dim] == size * self.world_size
        # A view would keep the padding in memory.
        return _from_rank_major(ranks, source, self.world_size).contiguous()

    def reduce(self, x: Tensor, op: str) -> Tensor:
        """The "sum" or the "max" over ranks, on every rank."""
        return x if self.world_size == 1 else self.start_all_reduce(x, "P", "I", op).wait()

    def _rank_slice(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim] // self.world_size
        if isinstance(self.rank, int):
            return x.narrow(dim, self.rank * size, size)
        # Simulated ranks: narrow takes an int, index_select takes the tensor that the rank is.
        rank = self.rank.reshape(1).to(x.device)
        return (
            x.unflatten(dim, (self.world_size, size)).index_select(dim, rank).flatten(dim, dim + 1)
        )


# Not a global: if ranks are threads of one process, each has its own.
_CURRENT: ContextVar[Communicator | None] = ContextVar("communicator", default=None)


@contextlib.contextmanager
def running_on(tp: Communicator | None) -> Iterator[None]:
    """Context in which our operators, when torch's dispatcher runs them, use the communicator
    ``tp``.

    For graphs that are interpreted; the generated code holds its communicator.
    """
    # The token restores what was there before: runs may be nested.
    token = _CURRENT.set(tp)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_communicator() -> Communicator | None:
    """Return the communicator of the innermost :func:`running_on`; ``None`` outside, as in
    tracing."""
    return _CURRENT.get()


# Cached, because every collective of a step asks.
@functools.cache
def _is_rows(placement: str, world_size: int) -> bool:
    """Return whether the parts of all ranks, concatenated on dim 0, are the global value."""
    parsed = Placement.parse(placement)
    return parsed.dim == 0 and len(parsed.segments) < 2 and not parsed.padding(world_size)


def _apart(target: Placement, world_size: int, x: Tensor) -> Tensor:
    """Return the parts of all ranks of the global value ``x``, concatenated on dim 0."""
    ranks = _to_rank_major(x, target, world_size)
    if not target.dim:
        return ranks
    return ranks.unflatten(target.dim, (world_size, -1)).movedim(target.dim, 0).flatten(0, 1)


def _joined(source: Placement, world_size: int, ranks: Tensor) -> Tensor:
    """Inverse of :func:`_apart`, in one copy, without the padding."""
    dim = source.dim
    if not dim and len(source.segments) < 2:
        return without_padding(ranks, source, world_size)
    parts = ranks.chunk(world_size)
    if source.segments:
        sizes = [size // world_size for size in source.padded_segments(world_size)]
        # For each segment the pieces of all ranks, chained to one list.
        pieces = zip(
            *(
                first_pieces(part, dim, sizes, source.true_parts(rank, world_size))
                for rank, part in enumerate(parts)
            ),
            strict=True,
        )
        parts = tuple(itertools.chain.from_iterable(pieces))
    return torch.cat(parts, dim).contiguous()


def _to_rank_major(x: Tensor, placement: Placement, world_size: int) -> Tensor:
    """Reorder a segmented dim so that each rank's part is contiguous; pad it if needed."""
    x = padded(x, placement, world_size)
    if len(placement.segments) < 2:
        return x
    sizes = placement.padded_segments(world_size)
    pieces = [part.chunk(world_size, placement.dim) for part in x.split(sizes, placement.dim)]
    return torch.cat([piece[rank] for rank in range(world_size) for piece in pieces], placement.dim)


def _from_rank_major(x: Tensor, placement: Placement, world_size: int) -> Tensor:
    """Inverse of :func:`_to_rank_major`."""
    if len(placement.segments) > 1:
        sizes = [size // world_size for size in placement.padded_segments(world_size)]
        ranks = [part.split(sizes, placement.dim) for part in x.chunk(world_size, placement.dim)]
        x = torch.cat(
            [ranks[rank][part] for part in range(len(sizes)) for rank in range(world_size)],
            placement.dim,
        )
    return without_padding(x, placement, world_size)
