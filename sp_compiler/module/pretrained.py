"""Checkpoints in safetensors files; every rank reads its own part."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import ArgumentError, did_you_mean
from sp_compiler.base.placement import I, Placement
from sp_compiler.module.module_tree import MirrorModule
from sp_compiler.module.parameters import own_part
from sp_compiler.runtime.group import device_type_of
from sp_compiler.runtime.padding import make_room
from sp_compiler.runtime.parameter_gradients import local_tensor
from sp_compiler.runtime.rank_checks import RankAgreement, fingerprints

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MOST_NAMES = 10  # listed in an error


class Checkpoint:
    """The tensors of one or several safetensors files, read slice by slice.

    Args:
        path: a safetensors file, an index as HuggingFace writes it (``weight_map``: tensor name to
            file), or a folder with one of them.

    Raises:
        ArgumentError: the file does not exist or is damaged, or an index refers to files outside
            its folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._files = _tensor_files(Path(path))
        # Opened at first use, since the index of a large model names hundreds of files.
        self._open: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def part(self, name: str, placement: Placement, rank: int, world_size: int) -> Tensor:
        """Return a copy of ``rank``'s part of the tensor; nothing else is read from the file."""
        source = self._slice(name)
        shape = tuple(source.get_shape())
        with _readable(self._files[name], name):
            if not placement.is_sharded:
                full: Tensor = self._file(name).get_tensor(name)
                return full
            before = (slice(None),) * placement.dim
            pieces = [
                source[(*before, slice(start, stop))]
                for start, stop in _own_ranges(shape[placement.dim], placement, rank, world_size)
            ]
        # A slice may share the memory of the full tensor as it is mapped from the file.
        return torch.cat(pieces, placement.dim)

    def sample(self, name: str) -> Tensor:
        """Return the first row of the tensor; all of it if it has no rows."""
        source = self._slice(name)
        with _readable(self._files[name], name):
            # Enough to distinguish two files, and small enough to read for every tensor.
            first: Tensor = source[0:1] if source.get_shape() else self._file(name).get_tensor(name)
        return first

    def _slice(self, name: str) -> Any:
        with _readable(self._files[name], name):
            return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            with _readable(path, name):
                self._open[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._open[path]


@contextlib.contextmanager
def _readable(path: Path, name: str) -> Iterator[None]:
    """Context that adds the file and the tensor to errors of the safetensors library."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ArgumentError(
            f"{path}: cannot read tensor {name!r} ({error}); the file is damaged, incomplete or "
            "not a safetensors file, or an index names the wrong one: download it again, or load a "
            "file of torch.save by module.load_state_dict(torch.load(path, mmap=True), assign=True)"
        ) from error


def _own_ranges(
    size: int, placement: Placement, rank: int, world_size: int
) -> Iterator[tuple[int, int]]:
    """Return start and end of ``rank``'s part of each segment of a dim of ``size``."""
    start = 0
    for segment in placement.segments or (size,):
        # Rounded up, as placements pad: the last ranks may hold fewer units, or none.
        unit = placement.unit_size(segment)
        length = -(-(segment // unit) // world_size) * unit
        first, last = rank * length, (rank + 1) * length
        yield start + min(first, segment), start + min(last, segment)
        start += segment


def _tensor_files(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, by name."""
    if path.is_dir():
        candidates = [path / name for name in (_INDEX, _SINGLE) if (path / name).is_file()]
        path = candidates[0] if candidates else path
    if not path.is_file():
        raise ArgumentError(
            f"{path}: expected a safetensors file, or a folder with {_SINGLE} or {_INDEX} "
            "(a local one: download it first)"
        )
    if path.suffix == ".json":
        return {name: _inside(path, name, file) for name, file in _weight_map(path).items()}
    with _readable(path, "(any)"), safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def _weight_map(path: Path) -> dict[str, Any]:
    """Return the file name of each tensor in an index.

    Raises:
        ArgumentError: it is not an index.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path}: expected an index in JSON; {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise ArgumentError(
            f'{path}: expected the key "weight_map" with an object, tensor name to file name; got '
            f"{type(weight_map).__name__}"
        )
    return weight_map


def _inside(index: Path, name: str, file: Any) -> Path:
    """Return the file that ``index`` gives for the tensor ``name``.

    Raises:
        ArgumentError: not a file name, or outside the index's folder. An index comes with
            downloaded weights and must not make this machine read other files.
    """
    named = isinstance(file, str) and "\0" not in file
    path = index.parent / file if named else index.parent
    folder = index.parent.resolve()
    target = path.resolve()
    # The cache of huggingface_hub has links, snapshots/REVISION/FILE -> ../../blobs/HASH.
    blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not named or not any(map(target.is_relative_to, (folder, *blobs))):
        raise ArgumentError(
            f'{index}: "weight_map" gives {file!r} for {name!r}; expected the name of a file in '
            f"{folder} (links that lead out of it are not followed)"
        )
    if not target.is_file():
        raise ArgumentError(
            f'{index}: "weight_map" gives {file!r} for {name!r}: no such file in {folder}; copy '
            "every file of the checkpoint there"
        )
    return path


def find_name(names: Sequence[str], available: Sequence[str], prefix: str) -> str | None:
    """Return which of the ``available`` tensors has one of the model's ``names``.

    Checkpoints of a model without its head lack the ``prefix`` of the inner model, or have a prefix
    that the model lacks.
    """
    # The exact name first: a model may have a tensor under either spelling.
    candidates = list(names)
    if prefix:
        candidates += [name.removeprefix(f"{prefix}.") for name in names]
        candidates += [f"{prefix}.{name}" for name in names]
    known = set(available)
    return next((name for name in candidates if name in known), None)


def load_pretrained(
    module: MirrorModule, path: str | Path, agreement: RankAgreement, prefix: str = ""
) -> list[str]:
    """Fill the parameters and buffers of a compiled module; see its ``load_pretrained``."""
    layout = module._sp_layout
    inner = _submodule(module, prefix)
    # HuggingFace's name of the inner model, such as "transformer".
    base_prefix = str(getattr(inner, "base_model_prefix", "") or "")
    device = device_type_of(module)
    with Checkpoint(path) as checkpoint:
        # Names and shapes are checked before the first tensor is filled: a mismatch changes none.
        entries = _entries(inner, prefix)
        matched = _match(entries, checkpoint, prefix, base_prefix, path)
        # Machines may have different files; a mixture of their parts would go unnoticed.
        samples = {f"tensor {name!r} of the files": checkpoint.sample(name) for name, _ in matched}
        facts = fingerprints(samples)
        agreement.require_equal("calls load_pretrained()", facts)
        agreement.require_equal_over_data("calls load_pretrained()", facts)
        for stored, entry in matched:
            placement = layout.placements.get(entry.names[0], I)
            part = checkpoint.part(stored, placement, layout.group.rank, layout.group.world_size)
            if isinstance(entry.tensor, DTensor):
                part = own_part(part, entry.tensor)
            _fill(entry.tensor, part, device)
            if isinstance(entry.tensor, DTensor) and entry.tensor.device_mesh.ndim == 1:
                make_room(entry.tensor, placement, layout.group.world_size)
        used = {stored for stored, _ in matched}
        unused = [name for name in checkpoint.names() if name not in used]
    make_buffers(module, device)
    return unused


def _submodule(module: nn.Module, prefix: str) -> nn.Module:
    """Return the module ``prefix`` of the model.

    Raises:
        ArgumentError: there is none; the error lists the modules where the path ends.
    """
    try:
        return module.get_submodule(prefix)
    except AttributeError as error:
        known = [name for name, _ in module.named_modules() if name]
        parent = prefix
        while parent and parent not in known:
            parent = parent.rpartition(".")[0]
        inside = [name for name, _ in module.get_submodule(parent).named_children()]
        listed = ", ".join(f"{parent}.{name}" if parent else name for name in inside[:_MOST_NAMES])
        more = ", ..." if len(inside) > _MOST_NAMES else ""
        where = repr(parent) if parent else "the model"
        raise ArgumentError(
            f"prefix={prefix!r}: the model has no module of that name; "
            f"{did_you_mean(prefix, known)}the modules of {where} are {listed or '(none)'}{more}"
        ) from error


@dataclass
class _NamedTensor:
    """A parameter or a persistent buffer with all its names."""

    tensor: Tensor
    names: list[str]
    is_buffer: bool


def _entries(module: nn.Module, prefix: str) -> list[_NamedTensor]:
    """Return the tensors that a checkpoint of ``module``, at ``prefix`` in the model, should
    have."""
    by_id: dict[int, _NamedTensor] = {}
    for path, owner in module.named_modules(prefix=prefix, remove_duplicate=False):
        skipped = owner._non_persistent_buffers_set
        tensors = [*owner._parameters.items(), *owner._buffers.items()]
        for name, tensor in tensors:
            if tensor is None or name in skipped:
                continue
            # Tied tensors are read once, whichever of their names the file has.
            entry = by_id.setdefault(id(tensor), _NamedTensor(tensor, [], name in owner._buffers))
            entry.names.append(f"{path}.{name}" if path else name)
    return list(by_id.values())


def _match(
    entries: Sequence[_NamedTensor],
    checkpoint: Checkpoint,
    prefix: str,
    base_prefix: str,
    path: str | Path,
) -> list[tuple[str, _NamedTensor]]:
    """Return pairs of a name in the checkpoint and the tensor of the same shape to fill.

    Raises:
        ArgumentError: a parameter is missing, or has another shape.
    """
    available = checkpoint.names()
    matched, missing = [], []
    for entry in entries:
        names = [name.removeprefix(f"{prefix}.") for name in entry.names] if prefix else entry.names
        stored = find_name(names, available, base_prefix)
        if stored is not None:
            matched.append((stored, entry))
        # A buffer that already has values was computed by the model's constructor.
        elif not entry.is_buffer or entry.tensor.is_meta:
            missing.append(entry.names[0])
    if missing:
        raise ArgumentError(_missing_text(missing, available, prefix, path))
    for stored, entry in matched:
        # Read from the file's header, without the tensor.
        if checkpoint.shape(stored) != tuple(entry.tensor.shape):
            raise ArgumentError(
                f"{path}: {stored!r} has shape {checkpoint.shape(stored)}, the model's "
                f"{entry.names[0]!r} has {tuple(entry.tensor.shape)}: build the model with the "
                "configuration of this checkpoint"
            )
    return matched


def _missing_text(
    missing: Sequence[str], available: Sequence[str], prefix: str, path: str | Path
) -> str:
    """Return a text with the names looked for, those in the files, and how to match them."""
    sought = [name.removeprefix(f"{prefix}.") for name in missing] if prefix else missing
    looked_for = f", looked for as {', '.join(sought[:3])}..." if prefix else ""
    advice = "rename the tensors, or load a state dict with module.load_state_dict(...)"
    if (outer := _common_outer(available, sought, len(available))) is not None:
        cut = f"{{name.removeprefix({f'{outer}.'!r}): value for name, value in state.items()}}"
        advice = (
            f"its names start with {f'{outer}.'!r}: with safetensors.torch, read them as "
            f"state = load_file(path), write save_file({cut}, new_path), and load that"
        )
    elif (outer := _common_outer(missing, available, len(available))) is not None:
        advice = f"these are the weights of a part of the model: pass prefix={outer!r}"
    elif not prefix:
        advice = (
            f"for weights of a part of the model pass prefix='name of that part'; else {advice}"
        )
    return (
        f"{path} has no tensor for {len(missing)} parameters or buffers "
        f"({', '.join(missing[:3])}...){looked_for}; it has {', '.join(available[:3])}...; {advice}"
    )


def _common_outer(names: Sequence[str], inner: Sequence[str], num_files_names: int) -> str | None:
    """Return the prefix that ``names`` have compared with ``inner``; ``None`` unless this holds for
    at least half of the names in the files."""
    known = set(inner)
    found = Counter[str]()
    for name in names:
        steps = name.split(".")
        splits = ((".".join(steps[:i]), ".".join(steps[i:])) for i in range(1, len(steps)))
        # The longest suffix: many modules end with norm.weight.
        found.update([outer for outer, rest in splits if rest in known][:1])
    ((outer, count),) = found.most_common(1) or [("", 0)]
    return outer if count and 2 * count >= num_files_names else None


@torch.no_grad()
def _fill(tensor: Tensor, part: Tensor, device: str) -> None:
    """Put ``part`` into ``tensor``, which stays the same object for optimizers and tied modules."""
    if not tensor.is_meta:
        # The DTensor does not notice a write into its local part; a graph that saved it must raise.
        local_tensor(tensor).copy_(part)
        torch.autograd.graph.increment_version(tensor)
        return
    value = part.to(device=device, dtype=tensor.dtype)
    if isinstance(tensor, DTensor):
        value = DTensor(value, tensor._spec, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    # copy_() cannot give memory to a meta tensor; a swap keeps the object.
    vars(value).update(vars(tensor))
    torch.utils.swap_tensors(tensor, value)


@torch.no_grad()
def make_buffers(module: MirrorModule, device: str) -> None:
    """Compute buffers that are not in checkpoints, with the ``_init_weights`` of the model or of an
    enclosing part of it.

    Only modules without parameters are initialised, such as tables of rotary embeddings.
    """
    initialisers: dict[str, Any] = {"": getattr(module._sp_original, "_init_weights", None)}
    for path, mirror in module.named_modules():
        own = getattr(getattr(mirror, "_sp_original", None), "_init_weights", None)
        initialise = initialisers[path] = initialisers[path.rpartition(".")[0]] or own
        missing = {
            name: value
            for name, value in mirror._buffers.items()
            if value is not None and value.is_meta
        }
        if not missing or mirror._parameters or not isinstance(mirror, MirrorModule):
            continue
        if initialise is None:
            continue
        original = mirror._sp_original
        # The model's own code writes into its own module; the mirror takes the result.
        for name, value in missing.items():
            original._buffers[name] = torch.empty_like(value, device=device)
        initialise(original)
        mirror._buffers.update(original._buffers)
