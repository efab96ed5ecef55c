"""Modules that run hooks if they are the whole model or a block of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.module.hooks.block_hooks import (
    Invocation,
    backward_hook,
    backward_pre_hook,
    forward_hook,
    forward_pre_hook,
)

_OF_FORWARD = "_forward_hooks"
KINDS = (_OF_FORWARD, "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes in which ``nn.Module`` stores its hooks."""

# The running block; per context, since threads may call blocks at the same time.
_CALLED: ContextVar[tuple[nn.Module | None, Invocation | None]] = ContextVar(
    "_CALLED", default=(None, None)
)


class HookedModule(nn.Module):
    """The hooks of a :class:`~sp_compiler.module.module_tree.MirrorModule`."""

    # Set by the MirrorModule.
    _sp_layout: Any
    _sp_path: str

    # Hooks run on the whole model and on blocks; anywhere else they would silently never run. On
    # blocks, users' hooks see full values. FSDP's hooks use no values, and need no gathers.

    def register_forward_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        self._require_runnable("forward hook")
        if not _is_of_fsdp(hook):
            hook = forward_hook(hook)
            self._note_hooks()
        return super().register_forward_hook(hook, *args, **kwargs)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        self._require_runnable("forward pre-hook")
        self._sp_layout.num_hooks += 1
        if _is_of_fsdp(hook):
            _refuse_lone_fully_shard(self._sp_layout.group.mesh)
        else:
            hook = forward_pre_hook(hook)
            self._note_hooks()
        return super().register_forward_pre_hook(hook, *args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._require_runnable("backward hook")
        self._note_hooks()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        self._require_runnable("backward pre-hook")
        self._note_hooks()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def register_backward_hook(self, hook: Any) -> Any:
        """Register a hook of the older kind, on the whole model; use the full one on its parts.

        Raises:
            UnsupportedError: the module is a part of the model.
        """
        if self._sp_path:
            raise UnsupportedError(
                f"register_backward_hook on {self._sp_path!r}: its arguments would depend on the "
                "last operator of compiled code; use register_full_backward_hook"
            )
        return super().register_backward_hook(hook)

    def _note_hooks(self) -> None:
        if self._sp_path:
            self._sp_layout.hooked[self._sp_path] = self

    # Called by nn.Module in each call, for its backward; no argument tells which call it is.

    def _get_backward_hooks(self) -> Any:
        hooks, older = super()._get_backward_hooks()
        return self._on_block(backward_hook, hooks), older

    def _get_backward_pre_hooks(self) -> Any:
        return self._on_block(backward_pre_hook, super()._get_backward_pre_hooks())

    def _on_block(self, wrapped: Any, hooks: Sequence[Any]) -> list[Any]:
        called, invocation = _CALLED.get()
        if called is not self or invocation is None:
            return list(hooks)
        return [wrapped(hook, invocation.forms) for hook in hooks]

    def require_runnable_hooks(self, *, on_root: bool = False) -> None:
        """Raise an error if this module has a hook that would never run.

        Args:
            on_root: whether to check the root module too; False after FSDP has registered hooks
                there.
        """
        if (self._sp_path or on_root) and any(getattr(self, kind) for kind in KINDS):
            self._require_runnable("hook")

    def _require_runnable(self, what: str) -> None:
        blocks = self._sp_layout.blocks
        if not self._sp_path and not self._sp_layout.calls_root:
            raise UnsupportedError(
                f"a {what} on the whole model cannot run: a pipeline calls its stages, never the "
                "model; register it on a layer, or run its code before or after step()"
            )
        # Before compilation the blocks are unknown; require_runnable_hooks checks afterwards.
        if blocks is None or not self._sp_path or self._sp_path in blocks:
            return
        raise UnsupportedError(
            f"a {what} on module {self._sp_path!r} cannot run: it is inside compiled code. Hooks "
            f"run on the whole model and on its blocks: {', '.join(sorted(blocks)[:4]) or 'none'}"
        )


def call_block(
    block: HookedModule, invocation: Invocation, values: Sequence[Any]
) -> tuple[Any, ...]:
    """Run one call of a block, with its hooks."""
    before = _CALLED.set((block, invocation))  # for hooks of its backward
    try:
        outputs = block(invocation, *values)
    finally:
        # Otherwise it would keep the values of the whole forward alive.
        _CALLED.reset(before)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def run_block(block: HookedModule, invocation: Invocation, values: Sequence[Any]) -> Any:
    """Run the compiled code of one call after its pre-hooks."""
    if block._sp_path in block._sp_layout.hooked and getattr(block, _OF_FORWARD):
        # Take parts of the values that forward hooks will see, so that these are in the autograd
        # graph.
        values = invocation.take(invocation.inputs(values).through())
    outputs = invocation.run(*values)
    return outputs[0] if len(outputs) == 1 else outputs


def _is_of_fsdp(hook: Any) -> bool:
    # A method of FSDP's state, or for a group of modules a function around one.
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def _refuse_lone_fully_shard(mesh: DeviceMesh | None) -> None:
    """Raise an error for FSDP2 if "tp" is not an axis of a larger mesh, which it needs."""
    # Its hook is the only sign of fully_shard before it fails at the first parameter.
    if mesh is not None and mesh._get_root_mesh().ndim == 1:
        raise UnsupportedError(
            f"fully_shard on a module that {mesh.size()} ranks compute together, whose mesh has no "
            "axis for data: pass compile a mesh with the axes dp_shard and tp, which applies "
            "fully_shard over dp_shard; or compile(..., mesh=mesh, fsdp=False) and "
            'fully_shard(module, mesh=mesh["dp_shard"]), a slice of the same mesh'
        )
