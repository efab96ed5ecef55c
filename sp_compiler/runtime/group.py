"""The tensor-parallel group of a compiled module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import ArgumentError
from sp_compiler.base.warn import warn
from sp_compiler.emulation.group import BACKEND
from sp_compiler.ops.communicator import (
    Communicator,
    Exchange,
    ExpertRanks,
    FunctionalCollectives,
)
from sp_compiler.ops.counter import call_seed, draw_seed
from sp_compiler.runtime.failures.board import FailureBoard
from sp_compiler.runtime.failures.boards import failure_board
from sp_compiler.runtime.mesh_axes import (
    EXPERT_AXIS,
    SHARD_AXIS,
    TENSOR_AXIS,
    DataAxes,
    refuse_mixed_orders,
    refuse_pipeline_axis,
    refuse_unknown_axes,
    shards_over_experts,
    tensor_parallel_axis,
    with_expert_axes,
)
from sp_compiler.runtime.watched_collectives import WatchedCollectives, is_gloo, let_gloo_finish

# Backends without processes for the other ranks: there is nobody to wait for.
_ONE_PROCESS = ("fake", BACKEND)
RANK_TIMEOUT = timedelta(minutes=5)
_HOW = (
    "start one process a rank, for example `torchrun --nproc-per-node={tp} train.py`, and "
    "call torch.distributed.init_process_group() first. To see what compilation does without a "
    "process group use sp_compiler.plan(model, example_inputs, tp={tp}); to check its results in "
    "one process use sp_compiler.verify(model, example_inputs, tp={tp})"
)


@dataclass(frozen=True)
class TensorParallelGroup:
    """This process in its tensor-parallel group.

    Attributes:
        mesh: the one-dimensional mesh of the axis "tp"; ``None`` for one rank.
        communicator: ``tp`` of the generated code.
        timeout: how long this rank waits for others.
        board: reports failures between ranks; ``None`` for one rank and for a fake group, whose
            ranks are not processes.
        collectives: collectives of ``communicator`` on the CPU, for which the host waits; ``None``
            on accelerators.
        data: the data axes of the user's mesh.
        data_boards: one board per data axis, and one for "dp_shard" and "ep" together.
        grid: "pp", all data axes and "tp"; ``None`` if experts are not divided.
    """

    mesh: DeviceMesh | None
    communicator: Communicator
    timeout: timedelta = RANK_TIMEOUT
    board: FailureBoard | None = None
    collectives: WatchedCollectives | None = None
    data: DataAxes = field(default_factory=DataAxes)
    data_boards: tuple[FailureBoard, ...] = ()
    grid: DeviceMesh | None = None

    def boards(self, *, over_data: bool = True) -> tuple[FailureBoard, ...]:
        """Return the boards of the module's axes, and of the data axes if ``over_data``."""
        own = [] if self.board is None else [self.board]
        return (*own, *(self.data_boards if over_data else ()))

    def note_call(self, *, over_data: bool = True) -> None:
        """Note on the boards whether a call that begins records a graph: as long as none has, no
        backward can have errors that concern the group."""
        for board in self.boards(over_data=over_data):
            board.trains |= torch.is_grad_enabled()

    @contextlib.contextmanager
    def reporting(self, *, over_data: bool = True) -> Iterator[None]:
        """Context whose errors raise on the other ranks too.

        Args:
            over_data: whether ranks along the data axes may wait for this one.

        Raises:
            RankFailureError: the data axes are unusable after a failure.
        """
        with contextlib.ExitStack() as stack:
            for board in self.boards(over_data=over_data):
                stack.enter_context(board.reporting())
            # Reported to all groups before this rank waits in one, whose ranks may wait in another.
            for board in self.boards(over_data=over_data):
                board.report_unfinished_step()
            # Now, because FSDP's hooks gather. The board of "tp" is asked where calls are compared.
            for board in self.data_boards if over_data else ():
                board.require_usable(self.timeout)
            yield

    @property
    def rank(self) -> int:
        rank = self.communicator.rank
        assert isinstance(rank, int)
        return rank

    @property
    def world_size(self) -> int:
        return self.communicator.world_size

    @property
    def expert_mesh(self) -> DeviceMesh | None:
        """The axis "ep", with "tp" if that has several ranks; ``None`` if experts are not
        divided."""
        if self.grid is None:
            return None
        return self.grid[EXPERT_AXIS] if self.mesh is None else self.grid[EXPERT_AXIS, TENSOR_AXIS]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return None if self.mesh is None else self.mesh.get_group()

    @property
    def device_type(self) -> str:
        return "cpu" if self.mesh is None else self.mesh.device_type


def tensor_parallel_group(
    tp: int | None = None,
    mesh: DeviceMesh | None = None,
    device_type: str = "cpu",
    rank_timeout: timedelta = RANK_TIMEOUT,
    *,
    in_stages: bool = False,
    of_graph: bool = False,
) -> TensorParallelGroup:
    """Return the group of ``tp`` ranks, or of the axis "tp" of ``mesh``.

    One rank needs no process group. A rank waits for others for ``rank_timeout``. For stages of a
    pipeline (``in_stages``) the mesh has an axis "pp", and may lack "tp". A graph of
    ``torch.compile`` (``of_graph``) may be inside a module that averages gradients already;
    otherwise ``tp=1`` in one of several processes gives a warning.

    Raises:
        ArgumentError: no process group, or one of another size; a mesh without the axis, or with
            ranks in mixed orders; ``tp`` and ``mesh`` disagree; or ``tp`` is not a positive int.
        UnsupportedError: an axis of several ranks has an unknown name.
    """
    data = DataAxes()
    if mesh is not None:
        lacks_tp = in_stages and TENSOR_AXIS not in (mesh.mesh_dim_names or ())
        axis = mesh if lacks_tp else tensor_parallel_axis(mesh)
        size = 1 if lacks_tp else axis.size()
        if tp is not None and tp != size:
            raise ArgumentError(
                f'tp={tp}, but the mesh has {size} ranks on its axis "{TENSOR_AXIS}": leave out '
                "tp=, or pass a mesh of that size"
            )
        refuse_unknown_axes(mesh)
        refuse_mixed_orders(mesh)
        if not in_stages:
            refuse_pipeline_axis(mesh)
        tp, data = size, DataAxes.of(mesh)
        if data.num_expert_ranks > 1:
            mesh = with_expert_axes(mesh)
            axis, data = mesh[TENSOR_AXIS], DataAxes.of(mesh)
    if tp is None:
        raise ArgumentError('give tp=<number of ranks>, or mesh= with an axis named "tp"')
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ArgumentError(f"tp={tp!r}: expected a positive int, the number of ranks")
    # No collective runs, so none has to be initialised; parameters stay plain tensors.
    if tp == 1:
        if mesh is None and not of_graph:
            _warn_of_copies()
        boards = _data_boards(data, rank_timeout)
        one = Communicator(None, 0, 1)
        group = TensorParallelGroup(None, one, rank_timeout, data=data, data_boards=boards)
        return _dividing_experts(group, mesh)
    if mesh is None:
        axis = DeviceMesh(
            device_type, list(range(_world_of_size(tp))), mesh_dim_names=(TENSOR_AXIS,)
        )
    return _dividing_experts(watched_group(axis, rank_timeout, data=data), mesh)


def _dividing_experts(group: TensorParallelGroup, mesh: DeviceMesh | None) -> TensorParallelGroup:
    if mesh is None or group.data.num_expert_ranks == 1:
        return group
    ranks, timeout = mesh.get_group(EXPERT_AXIS), group.timeout
    exchange: Exchange = FunctionalCollectives(ranks.group_name)
    boards = group.data_boards
    if boards:
        # FSDP2 waits for other parameters in a group of its own.
        shards = shards_over_experts(mesh).get_group()
        kind = f'data-parallel group "{SHARD_AXIS}" x "{EXPERT_AXIS}"'
        boards = (*boards, failure_board(shards, kind, timeout))
        if is_gloo(ranks):
            board = boards[group.data.names.index(EXPERT_AXIS)]
            exchange = WatchedCollectives(ranks, board, timeout)
    group.communicator.experts = ExpertRanks(ranks, exchange)
    return replace(group, grid=mesh, data_boards=boards)


def watched_group(
    axis: DeviceMesh,
    rank_timeout: timedelta,
    kind: str = "tensor-parallel group",
    data: DataAxes | None = None,
) -> TensorParallelGroup:
    """Return the group of a one-dimensional mesh, with a board; ``kind`` is its name in messages.

    Raises:
        ArgumentError: tensors of an accelerator would go through gloo.
    """
    data = data or DataAxes()
    group = axis.get_group()
    rank, size = dist.get_rank(group), axis.size()
    if dist.get_backend(group) in _ONE_PROCESS:
        return TensorParallelGroup(axis, Communicator(group, rank, size), rank_timeout, data=data)
    if axis.device_type != "cpu" and is_gloo(group, axis.device_type):
        # Seen with torch 2.11 on an H100: its functional collectives kill the process.
        raise ArgumentError(
            f'the {kind} sends tensors of "{axis.device_type}" through gloo, with which PyTorch '
            'crashes; give it a backend for that device: init_process_group("nccl"), or '
            'init_process_group("cpu:gloo,cuda:nccl")'
        )
    board, boards = failure_board(group, kind, rank_timeout), _data_boards(data, rank_timeout)
    if axis.device_type != "cpu" or not is_gloo(group):
        communicator = Communicator(group, rank, size)
        return TensorParallelGroup(axis, communicator, rank_timeout, board, None, data, boards)
    let_gloo_finish()
    watched = WatchedCollectives(group, board, rank_timeout)
    communicator = Communicator(group, rank, size, watched)
    return TensorParallelGroup(axis, communicator, rank_timeout, board, watched, data, boards)


def _data_boards(data: DataAxes, timeout: timedelta) -> tuple[FailureBoard, ...]:
    """A board for each data-parallel axis; none in a fake group, whose ranks are not processes."""
    if data.mesh is None or dist.get_backend(data.mesh.get_group(0)) in _ONE_PROCESS:
        return ()
    return tuple(
        failure_board(data.mesh.get_group(name), f'data-parallel group "{name}"', timeout)
        for name in data.names
    )


def _warn_of_copies() -> None:
    if not dist.is_available() or not dist.is_initialized():
        return
    size = dist.get_world_size()
    if size > 1 and dist.get_rank() == 0 and dist.get_backend() not in _ONE_PROCESS:
        warn(
            f"tp=1 in {size} processes: each of them trains a copy of the model by itself. Pass "
            f"tp={size} to divide the model, or a mesh with an axis dp_replicate or dp_shard to "
            "average gradients, or wrap the compiled module in DistributedDataParallel"
        )


def _world_of_size(tp: int) -> int:
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            f"tp={tp} needs a process group of {tp} ranks and there is none; " + _HOW.format(tp=tp)
        )
    world_size = dist.get_world_size()
    if world_size != tp:
        raise ArgumentError(
            f"tp={tp}, but the default process group has {world_size} ranks; with more ranks than "
            f'tp pass mesh=init_device_mesh(..., mesh_dim_names=("dp_shard", "{TENSOR_AXIS}")); '
            "else " + _HOW.format(tp=tp)
        )
    return world_size


def on_device(number: Tensor, device: torch.device) -> Tensor:
    """Return ``number``, a 0-dim tensor, on ``device``, without making the host wait."""
    if number.device.type != "cpu" or device.type == "cpu":
        return number.to(device)
    # A copy from the host's memory ends after all earlier kernels, and the host waits for it; an
    # argument of a kernel needs no wait.
    return torch.full((), number.item(), dtype=number.dtype, device=device)


def forward_seed(group: TensorParallelGroup, device: torch.device) -> Tensor:
    """Return the seed of one forward's random numbers, the same on all ranks, from rank 0's
    generator.

    Ranks with different data get different seeds, even if their generators have the same state:
    equal masks on different samples would be correlated noise.
    """
    seed = on_device(draw_seed(), device)
    if group.process_group is not None:
        broadcast(seed, group)
    # Not for the first part, so that it draws what a run without the axis draws.
    return call_seed(seed, group.data.rank) if group.data.rank else seed


@torch.no_grad()
def broadcast(value: Tensor, group: TensorParallelGroup) -> None:
    """Overwrite ``value`` on every rank with rank 0's values."""
    sent = _sendable(value, group.device_type)
    if group.collectives is not None:
        group.collectives.broadcast(sent)
    else:
        dist.broadcast(sent, group=group.process_group, group_src=0)
    if sent is not value:
        value.copy_(sent)


@torch.no_grad()
def broadcast_over_data(value: Tensor, group: TensorParallelGroup) -> None:
    """Overwrite ``value`` with the values of the ranks that read the first part of the data."""
    if group.data.mesh is None:
        return
    sent = _sendable(value, group.data.mesh.device_type)
    for name in group.data.names:
        dist.broadcast(sent, group=group.data.mesh.get_group(name), group_src=0)
    if sent is not value:
        value.copy_(sent)


def _sendable(value: Tensor, device_type: str) -> Tensor:
    """Return ``value`` in the form that collectives for ``device_type`` accept."""
    # NCCL does not accept CPU tensors, which offloaded parameters are.
    sent = value if value.device.type == device_type else value.to(device_type)
    return sent.contiguous()


def device_type_of(module: torch.nn.Module) -> str:
    """Return the device type of the parameters; if they are on meta, that of their mesh, or else
    the accelerator's or the CPU's."""
    for parameter in module.parameters():
        if not parameter.is_meta:
            return parameter.device.type
        if isinstance(parameter, DTensor):
            return parameter.device_mesh.device_type
    # A model on meta is loaded to where it will run.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"
