"""The weights of a compiled module: read from files and state dicts, saved in full."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.module.calls import require_data
from sp_compiler.module.module_tree import MirrorModule
from sp_compiler.module.pretrained import load_pretrained, make_buffers
from sp_compiler.module.state import ModuleState
from sp_compiler.module.views import tied_names
from sp_compiler.runtime.group import TensorParallelGroup, device_type_of

_FULL_STATE = "torch's get_model_state_dict with StateDictOptions(full_state_dict=True)"

_NO_SHARDED_SAVE = (
    "save_pretrained() on several ranks needs unsharded weights: pass state_dict=state, "
    f"where state = module.full_state_dict() (or {_FULL_STATE}), which all ranks must "
    "call, and save on rank 0"
)
_ONE_RANKS_STAGES = (
    "the module of a pipeline has the parameters of this rank's stages: call state = "
    "pipeline.full_state_dict() on all ranks, and on rank 0 torch.save(state, path) or "
    "pipeline.module.save_pretrained(folder, state_dict=state)"
)


class Weights(MirrorModule):
    """Reading and saving of the weights, as a base class of the module."""

    _sp_state: ModuleState

    def load_pretrained(self, path: str | Path, prefix: str = "") -> list[str]:
        """Fill the parameters from safetensors files; every rank reads its own part of each.

        For a module built on the meta device, this allocates the memory of the parameters, so no
        rank ever holds the full model. Placements must be known: pass ``example_inputs`` to
        :func:`sp_compiler.compile`, or call :meth:`prepare` first; otherwise unsharded parameters
        are read.

        Args:
            path: a ``.safetensors`` file, or a folder as HuggingFace's ``save_pretrained`` writes
                it, with one file, or several and an index.
            prefix: name of the inner module to which the files belong, such as ``"encoder"`` for an
                encoder in your own wrapper; names in the files are relative to it. Parameters
                outside of it do not change.

        Returns:
            Names of tensors in the files for which the model has no parameter or buffer.

        Raises:
            ArgumentError: there is no such file, or no module named ``prefix``; a parameter is
                missing in the files or has another shape.
            RankMismatchError: the ranks found different files.
        """
        with self._sp_state.group.reporting():
            return load_pretrained(self, path, self._sp_state.agreement, prefix)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Like ``nn.Module.load_state_dict``; tied parameters stay tied with ``assign`` too.

        Raises:
            ArgumentError: parameters are on the meta device, and ``assign`` is not set.
        """
        parameters = self._sp_state.parameters
        unfilled = [name for name in state_dict if name in parameters and parameters[name].is_meta]
        # torch would only warn for each that nothing was copied.
        if unfilled and not assign:
            raise ArgumentError(
                f"{len(unfilled)} parameters are on the meta device ({', '.join(unfilled[:3])}...) "
                "and have no memory to copy to: pass assign=True, or call "
                "module.load_pretrained(path)"
            )
        # With assign, torch puts a new parameter under each name.
        ties = tied_names(parameters)
        result = super().load_state_dict(state_dict, strict, assign)
        for first, *others in ties if assign else ():
            for name in others:
                parameters.replace(name, parameters[first])
        if assign:
            # Buffers that are not in state dicts, on the device of the parameters.
            make_buffers(self, device_type_of(self))
        return result

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the model's own weights, unsharded, on the CPU of rank 0; ``{}`` on other ranks.

        All ranks must call it. Apart from the result on rank 0, a rank holds one unsharded tensor
        at a time. Pass the result to ``torch.save``, ``safetensors`` or the original model's
        ``load_state_dict``: ``state = module.full_state_dict()``, then ``if rank == 0:
        torch.save(state, path)``.

        Raises:
            ArgumentError: the parameters have no data yet.
            UnsupportedError: of the module of a pipeline, which has one rank's stages.
        """
        state = self._sp_state
        if not state.layout.calls_root:
            raise UnsupportedError(_ONE_RANKS_STAGES)
        with state.group.reporting():
            require_data(state)
            state.agreement.require_equal("calls full_state_dict()", {})
            return _full_state_dict(self, state.group)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Like ``nn.Module.state_dict``; every rank must call it, to reorder fused weights."""
        state = self._sp_state
        # Without fused weights nothing is communicated, and a rank may save by itself.
        if all(placement.is_in_order for _, placement in state.stored()):
            return super().state_dict(*args, **kwargs)
        with state.group.reporting():
            state.agreement.require_equal("calls state_dict()", {})
            return super().state_dict(*args, **kwargs)

    def save_pretrained(self, folder: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method, if it has one.

        Raises:
            UnsupportedError: on several ranks, without ``state_dict=`` with unsharded weights.
        """
        # By default, HuggingFace saves state_dict(), which has one rank's part of the weights.
        if kwargs.get("state_dict") is None:
            if not self._sp_state.layout.calls_root:
                raise UnsupportedError(_ONE_RANKS_STAGES)
            if self._sp_state.group.world_size > 1:
                raise UnsupportedError(_NO_SHARDED_SAVE)
        # A copy, since HuggingFace empties the dict.
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = dict(kwargs["state_dict"])
        return super().__getattr__("save_pretrained")(folder, *args, **kwargs)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Context without torch's warning that gathering over two axes takes two collectives.

    It advises a group over both, which is not worthwhile for rare calls.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def distinct(state: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the values of a state dict that was made with ``keep_vars``, each once, by all its
    names: tied parameters are one object there."""
    # The dict keeps the values alive, so that no two of them have the same id.
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return {tuple(same): state[same[0]] for same in names.values()}


@torch.no_grad()
@_without_advice()
def kept_full(value: Any, *, keeps: bool) -> Any:
    """Return a value of a state dict, if a tensor unsharded and on the CPU; a collective call.

    ``keeps``: whether this rank needs it; otherwise ``None`` instead of a tensor, dropped at once:
    the rank may lack memory for the full model.
    """
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if not isinstance(full, Tensor):
        return full
    return full.detach().cpu() if keeps else None


def keeps_full_state(group: TensorParallelGroup) -> bool:
    """Return whether this rank has full state dicts: one of those with the same parameters."""
    return group.rank == group.data.rank == 0


def _full_state_dict(module: nn.Module, group: TensorParallelGroup) -> dict[str, Tensor]:
    """Return the unsharded state of ``module`` on the CPU of rank 0, ``{}`` on other ranks; a
    collective call."""
    keeps = keeps_full_state(group)
    state = module.state_dict(keep_vars=True)
    result = {}
    for names, value in distinct(state).items():
        result.update(dict.fromkeys(names, kept_full(value, keeps=keeps)))
    return {name: result[name] for name in state} if keeps else {}
