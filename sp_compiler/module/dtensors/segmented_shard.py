"""DTensor placements of a dim with segments, each sharded over all ranks.

Every rank holds its own heads of q, k and v of a fused weight. DTensor's ``_StridedShard(dim,
split_factor=n)`` expresses this for n equal segments; for unequal ones it has no placement. Its
rules make new placements from only ``dim`` and ``split_factor`` (for a transposed matrix, a sum, a
stack), so a custom class would be lost at the first operation. Instead, a negative ``split_factor``
encodes the segments. The method of ``_StridedShard`` that splits a tensor into shards is wrapped to
understand it; all code that joins shards uses that method too. Equal segments are encoded in the
same way, because ``_StridedShard`` propagates them wrongly through some views; no size is a
multiple of a negative factor, so rules that would reshape the dim raise an error.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import (
    DTensorRedistributePlanner,
    _gen_transform_infos_non_cached,
    _TransformInfo,
)
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import S, Segmentation
from sp_compiler.base.shards import enlarged
from sp_compiler.module.dtensors.strided_rules import teach_strided_rules
from sp_compiler.runtime.padding import stored_part

# Factor to segments. A factor is a hash of its segments, so entries never become invalid.
_SEGMENTS: dict[int, Segmentation] = {}


def segmented_shard(dim: int, segments: tuple[int, ...], units: int = 0) -> _StridedShard:
    """Return the placement of ``dim`` with ``segments``: every rank has a chunk of each.

    Args:
        units: number of units in each segment, such as heads, which are not split; the last
            ranks may have fewer, or none. 0 if each segment is divisible.
    """
    _understand_segments()
    # Hash of the content: every process must encode a placement in the same way.
    text = repr((segments, units) if units else segments)
    digest = hashlib.sha256(text.encode()).digest()
    # 62 bits: torch keeps it in a signed 64-bit integer.
    factor = -1 - (int.from_bytes(digest[:8], "big") >> 2)
    segmentation = Segmentation(segments, units)
    assert _SEGMENTS.setdefault(factor, segmentation) == segmentation
    return _StridedShard(dim, split_factor=factor)


def segments_of(placement: Placement) -> tuple[int, ...]:
    """Return the segments of a placement made by :func:`segmented_shard` or derived from one;
    ``()`` for others.

    Raises:
        UnsupportedError: the placement comes from another process, and its segments are unknown
            here.
    """
    segmentation = _segmentation_of(placement)
    return segmentation.sizes if segmentation else ()


def _segmentation_of(placement: Placement) -> Segmentation | None:
    if not isinstance(placement, _StridedShard):
        return None
    factor = int(placement.split_factor)
    if factor > 0:
        return None
    if factor not in _SEGMENTS:
        raise UnsupportedError(
            "a DTensor placed in segments by sp_compiler in another process: load checkpoints "
            "through module.state_dict() and torch.distributed.checkpoint"
        )
    return _SEGMENTS[factor]


@functools.cache
def _understand_segments() -> None:
    """Wrap ``_StridedShard`` for this process; DTensors without segments behave as before."""
    split = _StridedShard._split_tensor
    gather = _StridedShard._to_replicate_tensor
    locate = _utils._get_shard_size_and_offsets
    names = list(inspect.signature(locate).parameters)
    teach_strided_rules()
    _plan_redistributions()

    @functools.wraps(split)
    def _split_tensor(
        self: _StridedShard, tensor: Tensor, num_chunks: int, **kwargs: Any
    ) -> tuple[list[Tensor], list[int]]:
        if not segments_of(self):
            return split(self, tensor, num_chunks, **kwargs)
        shards = _shards(self, tensor, num_chunks)
        if not kwargs.get("with_padding", True):
            return shards, []
        # The first rank has the most rows; collectives need equal sizes.
        rows = shards[0].shape[self.dim]
        missing = [rows - shard.shape[self.dim] for shard in shards]
        return [enlarged(shard, self.dim, rows) for shard in shards], missing

    @functools.wraps(gather)
    def _to_replicate_tensor(
        self: _StridedShard, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, *args: Any
    ) -> Tensor:
        rows, ranks = local_tensor.shape[self.dim], mesh.size(mesh_dim)
        # Missing rows, as when another axis shards them too, would be padded silently.
        if segments_of(self) and not _has_all(self, rows, mesh.get_local_rank(mesh_dim), ranks):
            raise _not_these_rows(self, rows * ranks)
        return gather(self, local_tensor, mesh, mesh_dim, *args)

    @functools.wraps(locate)
    def _get_shard_size_and_offsets(*args: Any) -> tuple[int, Tensor | None]:
        size, offsets = locate(*args)
        placement = args[names.index("placement")]
        # Callers that ask for all offsets use only the first, as if the rows were a range.
        if offsets is None or not size or not segments_of(placement):
            return size, offsets
        if bool((offsets.diff() != 1).any()):
            raise UnsupportedError(
                f"a DTensor sharded in {_text(placement)} has no contiguous rows on a rank: save "
                "module.state_dict() and optimizer.state_dict(), which have contiguous parts, read "
                "parameter.full_tensor(), and load full tensors with module.load_state_dict(); "
                "set_peft_model_state_dict() loads them only before the module's first call"
            )
        return size, offsets

    _StridedShard._split_tensor = _split_tensor  # type: ignore[method-assign]
    _StridedShard._to_replicate_tensor = _to_replicate_tensor  # type: ignore[method-assign, assignment]
    _utils._get_shard_size_and_offsets = _get_shard_size_and_offsets  # type: ignore[assignment]
    _StridedShard.__repr__ = _shown(_StridedShard.__repr__, "_StridedShard(dim={}, {})")  # type: ignore[method-assign]
    _StridedShard.__str__ = _shown(_StridedShard.__str__, "_S({}, {})")  # type: ignore[method-assign]


def _shards(placement: _StridedShard, tensor: Tensor, world_size: int) -> list[Tensor]:
    """Return the parts of all ranks; the last may be smaller."""
    return [_shard(placement, tensor, rank, world_size) for rank in range(world_size)]


def _shard(placement: _StridedShard, tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """Return the part of one rank."""
    segments = _segmentation_of(placement)
    if segments is None or sum(segments.sizes) != tensor.shape[placement.dim]:
        raise _not_these_rows(placement, tensor.shape[placement.dim])
    return stored_part(tensor, S(placement.dim, *segments), rank, world_size)


def _has_all(placement: _StridedShard, rows: int, rank: int, world_size: int) -> bool:
    """Return whether ``rows`` is the number of rows that ``rank`` has in all segments."""
    segments = _segmentation_of(placement)
    assert segments is not None
    # Simulated ranks, which have no single number, have different sizes.
    if segments.units and not isinstance(rank, int):
        return True
    return rows == _own_rows(placement, sum(segments.sizes), rank, world_size)


def _own_rows(placement: Placement, rows: int, rank: int, world_size: int) -> int:
    """Return how many of ``rows`` ``rank`` has; without segments, the last ranks may have fewer."""
    segments = _segmentation_of(placement) or Segmentation((rows,), rows)
    if sum(segments.sizes) != rows:
        raise _not_these_rows(placement, rows)
    if not segments.units:  # as many on every rank, so that simulated ranks need no number
        return rows // world_size
    return sum(S(0, *segments).true_parts(rank, world_size))


def _plan_redistributions() -> None:
    """Let DTensor redistribute to and from a placement with segments."""
    plan = DTensorRedistributePlanner.generate_graph_based_transform_infos

    @functools.wraps(plan)
    def generate_graph_based_transform_infos(
        self: DTensorRedistributePlanner, source: DTensorSpec, target: DTensorSpec, *args: Any
    ) -> Any:
        if any(map(segments_of, (*source.placements, *target.placements))):
            return _steps(source, target)
        return plan(self, source, target, *args)

    DTensorRedistributePlanner.generate_graph_based_transform_infos = (  # type: ignore[method-assign]
        generate_graph_based_transform_infos  # type: ignore[assignment]
    )


class _Cut(NamedTuple):
    """What a mesh axis does to a dim with segments: it shards a tensor of ``shape``."""

    axis: int
    placement: Placement
    shape: tuple[int, ...]


def _steps(source: DTensorSpec, target: DTensorSpec) -> list[_TransformInfo]:
    """Return the steps from ``source`` to ``target``.

    Dims with segments are joined in the reverse order of their cuts, through the full tensor: the
    factor describes neither the order of mesh axes nor a change from shard to shard.
    """
    joined, cut = _cuts(source), _cuts(target)
    between = _gen_transform_infos_non_cached(_uncut(source, joined), _uncut(target, cut))
    # Segments that stay are not gathered because another axis joins their rows.
    stay = cut if joined == cut else [c for c in cut if c in joined and segments_of(c.placement)]
    first = [each for each in reversed(joined) if each not in stay]
    last = [each for each in cut if each not in stay]
    return [
        *(_TransformInfo(axis, (where, Replicate()), shape) for axis, where, shape in first),
        *between,
        *(_TransformInfo(axis, (Replicate(), where), shape) for axis, where, shape in last),
    ]


def _cuts(spec: DTensorSpec) -> list[_Cut]:
    """Return how the dims with segments are sharded, in order."""
    cuts: list[_Cut] = []
    order = _cutting_order(spec.placements)
    for dim in sorted({_dim(where) for where in spec.placements if segments_of(where)}):
        axes = [axis for axis in order if _dim(spec.placements[axis]) == dim]
        rows = spec.shape[dim]
        for axis in axes:
            where = spec.placements[axis]
            # Other axes cut the rows of this rank, whatever these are in the full tensor.
            where = where if segments_of(where) else Shard(dim)
            cuts.append(_Cut(axis, where, (*spec.shape[:dim], rows, *spec.shape[dim + 1 :])))
            # Not after the last one: a simulated rank has no single number.
            if axis != axes[-1]:
                rows = _own_rows(where, rows, spec.mesh.get_local_rank(axis), spec.mesh.size(axis))
    return cuts


def _dim(placement: Placement) -> int:
    """Return the dim that ``placement`` shards, -1 if none."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else -1


def _cutting_order(placements: Sequence[Placement]) -> list[int]:
    """Return the axes in the order in which they cut: the last one first, as a strided shard
    prescribes, but segments before all others."""
    return sorted(
        range(len(placements)), key=lambda axis: (not segments_of(placements[axis]), -axis)
    )


def _uncut(spec: DTensorSpec, cuts: Sequence[_Cut]) -> DTensorSpec:
    """Return ``spec`` before ``cuts``."""
    placements = list(spec.placements)
    for each in cuts:
        placements[each.axis] = Replicate()
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


@functools.cache
def distribute_full_tensors() -> None:
    """Let ``set_model_state_dict`` and ``set_optimizer_state_dict`` cut full tensors as FSDP2 does.

    Of rank 0's full tensors they cut a range of rows, which segments are not. Full tensors that
    every rank has they shard over the data axes first, whereas FSDP2 shards this rank's rows; torch
    fails for segments, and for a number of rows that the ranks do not divide.
    """
    distribute = _state_dict_utils._distribute_tensors
    cut = _state_dict_utils.distribute_tensor

    @functools.wraps(cut)
    def distribute_full_tensor(
        tensor: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> DTensor:
        if any(isinstance(where, _StridedShard) for where in placements):
            return _distributed(tensor, device_mesh, placements)
        return cut(tensor, device_mesh, placements)

    @functools.wraps(distribute)
    def _distribute_tensors(
        local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any
    ) -> None:
        for key in keys:
            # A parameter and what it is to be, if it is a DTensor.
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and any(map(segments_of, pair[0].placements)):
                like, full = pair
                local_state_dict[key] = _distributed(full, like.device_mesh, like.placements)
        distribute(local_state_dict, keys, *args, **kwargs)

    _state_dict_utils._distribute_tensors = _distribute_tensors
    _state_dict_utils.distribute_tensor = distribute_full_tensor  # type: ignore[assignment]


def _distributed(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Return ``full``, which every rank has, with ``placements``, of which one is strided."""
    part = own_shard(full, mesh, placements)
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def own_shard(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """Copy what this rank has of ``part``, which all ranks of ``mesh`` have; nothing is sent."""
    for axis in _cutting_order(placements):
        part = _own_chunk(part, placements[axis], mesh, axis)
    # Not a view, which would keep the full tensor alive.
    return part.clone(memory_format=torch.contiguous_format)


def _own_chunk(part: Tensor, where: Placement, mesh: DeviceMesh, axis: int) -> Tensor:
    """Return what this rank has of ``part``, which all ranks of ``axis`` have, if it is placed at
    ``where`` over that axis; may be a view."""
    rank, world_size = mesh.get_local_rank(axis), mesh.size(axis)
    if isinstance(where, _StridedShard) and segments_of(where):
        return _shard(where, part, rank, world_size)
    if not isinstance(where, (Shard, _StridedShard)):
        return part
    chunks = part.chunk(world_size, where.dim)
    return chunks[rank] if rank < len(chunks) else part.narrow(where.dim, 0, 0)


def _not_these_rows(placement: Placement, rows: int) -> UnsupportedError:
    return UnsupportedError(
        f"dim {_dim(placement)} of a DTensor is sharded in {_text(placement)} but "
        f"the ranks hold {rows} rows: a view changed the dim. Use the parameter itself, or "
        "module.full_state_dict()"
    )


def _text(placement: Placement) -> str:
    segments = _segmentation_of(placement)
    assert segments is not None
    heads = f", of {segments.units} units each," if segments.units else ""
    return f"segments {segments.sizes}{heads}"


def _shown(show: Callable[[_StridedShard], str], form: str) -> Callable[[_StridedShard], str]:
    """Return ``show``, extended to print segments."""

    @functools.wraps(show)
    def shown(self: _StridedShard) -> str:
        segments = _SEGMENTS.get(int(self.split_factor))
        if not segments:
            return show(self)
        units = f", units={segments.units}" if segments.units else ""
        return form.format(self.dim, f"segments={segments.sizes}{units}")

    return shown
