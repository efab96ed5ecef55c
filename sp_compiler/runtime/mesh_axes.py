"""The axes of a user's device mesh, and the position of this process on each.

The names are torchtitan's. Ranks of "tp" work on the same batch, ranks of "dp_shard",
"dp_replicate" and "ep" on different ones; "pp" is the axis of pipeline stages::

    mesh 2 x 2 ("dp_shard", "tp")        rank 0 | rank 1   batch 0
                                         rank 2 | rank 3   batch 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from sp_compiler.base.errors import ArgumentError, UnsupportedError

TENSOR_AXIS = "tp"
PIPELINE_AXIS = "pp"
REPLICATE_AXIS, SHARD_AXIS, EXPERT_AXIS = DATA_AXES = ("dp_replicate", "dp_shard", "ep")
AXES = (PIPELINE_AXIS, *DATA_AXES, TENSOR_AXIS)


@dataclass(frozen=True)
class DataAxes:
    """The axes over which batches differ.

    Attributes:
        mesh: the data axes of several ranks, "dp_replicate" first; ``None`` if there are none.
        rank: which part of the data this process reads.
        size: number of such parts.
    """

    mesh: DeviceMesh | None = None
    rank: int = 0
    size: int = 1

    @staticmethod
    def of(mesh: DeviceMesh) -> DataAxes:
        """Return the data axes of a mesh with known axis names.

        Raises:
            ArgumentError: "dp_shard" comes before "dp_replicate".
        """
        present = mesh.mesh_dim_names or ()
        # An axis of one rank makes no difference.
        names = tuple(name for name in DATA_AXES if name in present and mesh[name].size() > 1)
        if not names:
            return DataAxes()
        if sorted(names, key=present.index) != list(names):
            # A mesh cannot be sliced in another order, and HSDP does not accept that one.
            raise ArgumentError(
                f"mesh has the axes {present}: the data axes must come in the order "
                f"{', '.join(DATA_AXES)}"
            )
        rank, size = 0, 1
        for name in names:
            axis = mesh[name]
            # Numbered like the ranks of a mesh: the first axis is the slowest.
            rank, size = rank * axis.size() + axis.get_local_rank(), size * axis.size()
        return DataAxes(mesh[names], rank, size)

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.mesh is None else self.mesh.mesh_dim_names or ()

    @property
    def num_expert_ranks(self) -> int:
        """Number of ranks that divide the experts."""
        return self.mesh[EXPERT_AXIS].size() if self.mesh and EXPERT_AXIS in self.names else 1

    def num_shards(self, *, divided: bool) -> int:
        """Number of ranks that shard a parameter; ranks of "ep" do not shard experts, which are
        ``divided`` over them."""
        axes = (SHARD_AXIS,) if divided else (SHARD_AXIS, EXPERT_AXIS)
        return math.prod(
            self.mesh[name].size() for name in axes if self.mesh is not None and name in self.names
        )

    def described(self) -> str:
        """The axes with their sizes, for messages."""
        if self.mesh is None:
            return "no data-parallel axis"
        return _sizes_text(self.mesh, self.names)


def data_shard(mesh: DeviceMesh) -> tuple[int, int]:
    """Return which part of the data this process reads, and how many parts there are.

    Ranks of one "tp" group and of one pipeline read the same part. Pass the two numbers to a
    ``DistributedSampler(dataset, num_replicas=parts, rank=part)``.

    Args:
        mesh: as for :func:`sp_compiler.compile` or :func:`sp_compiler.pipeline`.

    Returns:
        ``(part, parts)``, with ``0 <= part < parts``.

    Raises:
        ArgumentError: the mesh has no axis "tp" or "pp", has no axis names, or has its data axes,
            or the ranks along an axis, in an order that process groups do not support.
        UnsupportedError: an axis of several ranks has an unknown name.
    """
    if not isinstance(mesh, DeviceMesh) or PIPELINE_AXIS not in (mesh.mesh_dim_names or ()):
        tensor_parallel_axis(mesh)
    refuse_unknown_axes(mesh)
    refuse_mixed_orders(mesh)
    axes = DataAxes.of(mesh)
    return axes.rank, axes.size


def tensor_parallel_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Return the one-dimensional slice "tp" of a user's mesh.

    Raises:
        ArgumentError: no mesh, no names, or none of them is "tp".
    """
    example = (
        'for example init_device_mesh("cuda", (4, 8), mesh_dim_names=("dp_shard", "tp")): 4 '
        "batches, each on 8 ranks"
    )
    remark = "of size 1 where there is no tensor parallelism"
    return named_axis(mesh, TENSOR_AXIS, user="a compiled module", example=example, remark=remark)


def named_axis(
    mesh: DeviceMesh | None, name: str, *, user: str, example: str, remark: str
) -> DeviceMesh:
    """Return the one-dimensional slice ``name`` of a user's mesh.

    Args:
        mesh: as the user gave it.
        name: name of the axis.
        user: what needs it, for messages.
        example: example of a mesh that has it, for messages.
        remark: remark on the axis, for messages.

    Raises:
        ArgumentError: no mesh, no names, or none of them is ``name``.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh={mesh!r}: expected a torch.distributed.device_mesh.DeviceMesh; {user} needs a "
            f'DeviceMesh with an axis named "{name}", {example}'
        )
    names = mesh.mesh_dim_names or ()
    if name not in names:
        raise ArgumentError(
            f'mesh has the axes {names or "(without names)"}; one of them must be named "{name}" '
            f"({remark}); {example}"
        )
    return mesh[name]


def refuse_unknown_axes(mesh: DeviceMesh) -> None:
    """Raise :class:`UnsupportedError` for an axis of several ranks with an unknown name."""
    unknown = [name for name in mesh.mesh_dim_names or () if name not in AXES]
    # One rank on an unknown axis does no harm: nothing is to be reduced over it.
    others = [name for name in unknown if mesh[name].size() > 1]
    if others:
        # Gradients would silently not be reduced over an axis of unknown meaning.
        raise UnsupportedError(
            f"the mesh has the axis {_sizes_text(mesh, others)}, but the known names "
            f'are {", ".join(AXES)}: call an axis over which batches differ "{SHARD_AXIS}" '
            f'(parameters sharded) or "{REPLICATE_AXIS}" (parameters replicated); sequences have '
            f'no axis of their own, such as "cp": "{TENSOR_AXIS}" divides them. Or pass '
            f'mesh["{TENSOR_AXIS}"] and reduce gradients over the rest yourself, for example by '
            "torch.distributed.fsdp.fully_shard(module, mesh=the other axis) on the compiled module"
        )


def refuse_mixed_orders(mesh: DeviceMesh) -> None:
    """Raise :class:`ArgumentError` if ranks along an axis ascend in one group and not in another.

    A process group orders its ranks by their numbers, whatever the mesh says::

        [[3, 2],     rank 2 is the first of the group (2, 3), rank 1 the second of (0, 1): in one
         [0, 1]]     column, where both should have the same part of a parameter
    """
    names = mesh.mesh_dim_names or ()
    # FSDP2 takes these two as one axis: see shards_over_experts.
    for axes in (*((name,) for name in names), (SHARD_AXIS, EXPERT_AXIS)):
        if not {*axes} <= {*names}:
            continue
        ends = range(-len(axes), 0)
        ranks = mesh.mesh.movedim([names.index(name) for name in axes], [*ends])
        groups = ranks.reshape(-1, ranks.shape[-len(axes) :].numel())
        orders = groups.argsort(-1)
        other = (orders != orders[0]).any(-1).nonzero()
        if len(other):
            raise ArgumentError(
                f"mesh has the ranks {groups[0].tolist()} along {' x '.join(axes)}, and in another "
                f"order {groups[other[0, 0]].tolist()}: a process group orders its ranks by their "
                "numbers, so neighbours in the mesh would have different parts of parameters. "
                "Let all ranks ascend along each axis, as init_device_mesh does"
            )


def with_expert_axes(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of ``mesh``, which has an axis "ep", on "pp", all data axes and "tp".

    FSDP2 shards experts over "dp_shard" and other parameters over that and "ep" together, which
    must be slices of one mesh, and needs an axis of one rank where the user has none. Creates
    process groups: all ranks must call it.
    """
    names = mesh.mesh_dim_names or ()
    # Every other axis has one rank.
    order = [names.index(name) for name in AXES if name in names]
    order += [index for index, name in enumerate(names) if name not in AXES]
    sizes = [mesh[name].size() if name in names else 1 for name in AXES]
    ranks = mesh.mesh.permute(order).reshape(sizes)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=AXES)


def shards_over_experts(grid: DeviceMesh) -> DeviceMesh:
    """Return "dp_shard" and "ep" of :func:`with_expert_axes` as one axis.

    The first call creates a process group: all ranks must make it.
    """
    return grid[SHARD_AXIS, EXPERT_AXIS]._flatten(f"{SHARD_AXIS}_{EXPERT_AXIS}")


def refuse_expert_axis(mesh: DeviceMesh | None) -> None:
    """Raise an error for an axis "ep" of several ranks where experts cannot be divided."""
    if not isinstance(mesh, DeviceMesh):
        return
    if EXPERT_AXIS in (mesh.mesh_dim_names or ()) and mesh[EXPERT_AXIS].size() > 1:
        raise UnsupportedError(
            f"the mesh has the axis {_sizes_text(mesh, [EXPERT_AXIS])}: experts are divided by "
            "sp_compiler.compile(model, mesh=mesh) and sp_compiler.pipeline(model, mesh=mesh, ...) "
            f'alone, not by torch.compile. The ranks of "{TENSOR_AXIS}" divide the width of each '
            f'expert, and "{SHARD_AXIS}" shards the parameters of experts like all others: add '
            "these ranks to one of the two"
        )


def refuse_pipeline_axis(mesh: DeviceMesh) -> None:
    """Raise an error for an axis "pp" of several ranks, each of which would run the full module."""
    if PIPELINE_AXIS in (mesh.mesh_dim_names or ()) and mesh[PIPELINE_AXIS].size() > 1:
        rest = tuple(name for name in mesh.mesh_dim_names or () if name != PIPELINE_AXIS)
        raise UnsupportedError(
            f'the mesh has {mesh[PIPELINE_AXIS].size()} ranks on its axis "{PIPELINE_AXIS}", and '
            "compile makes one module for all of them, not a stage for each: use "
            "sp_compiler.pipeline(model, mesh=mesh, ...), or pass the other axes, "
            f"mesh[{', '.join(repr(name) for name in rest)}], for stages that you cut yourself"
        )


def _sizes_text(mesh: DeviceMesh, names: Iterable[str]) -> str:
    return ", ".join(f'"{name}" of {mesh[name].size()} ranks' for name in names)
