"""Hooks on blocks: wrappers of users' hooks that pass full values instead of a rank's parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from sp_compiler.base.autocast import Autocast, under_autocast
from sp_compiler.module.hooks.block_values import BlockForms, Shown

Hook = Callable[..., Any]


class Invocation:
    """One call of a block, passed to the block's ``forward`` before its values.

    Args:
        run: the compiled code.
        forms: returns the forms of its values.
        autocast: the caller's autocast, under which hooks run; the compiled code already contains
            its casts.
    """

    def __init__(
        self,
        run: Callable[..., tuple[Any, ...]],
        forms: Callable[[], BlockForms],
        autocast: Autocast,
    ) -> None:
        self.run = run
        self.autocast = autocast
        self._make_forms = forms
        self._inputs: Shown | None = None

    @cached_property
    def forms(self) -> BlockForms:
        # Computed on demand, since most blocks have no hooks.
        return self._make_forms()

    def inputs(self, values: Sequence[Any]) -> Shown:
        """Return ``values`` as hooks see them; all hooks see the same tensors."""
        # FSDP's hooks, and torch's wrappers for backward hooks, replace tensors by new ones,
        # through which gradients must flow.
        latest = self._inputs
        if latest is None or any(map(operator.is_not, latest.values, values)):
            latest = self._inputs = self.forms.inputs(values)
        return latest

    def seen_inputs(self, values: Sequence[Any]) -> Shown:
        """Return ``values``, with which the block was called, as forward hooks see them."""
        # They are not there yet if an error came before the block ran: then only hooks run that
        # were registered with always_call.
        return self._inputs or self.inputs(values)

    def take(self, inputs: Shown) -> tuple[Any, ...]:
        """Return the values with which the block is called after a hook."""
        self._inputs = inputs
        return inputs.values


def _invocation(args: Sequence[Any]) -> Invocation | None:
    """Return the call if ``args`` are those of a block, rather than those of the whole model."""
    return args[0] if args and isinstance(args[0], Invocation) else None


def forward_pre_hook(hook: Hook) -> Hook:
    """Return ``hook`` for a block, which may be registered with or without keyword arguments."""

    def on_block(module: nn.Module, args: tuple[Any, ...], *kwargs: Any) -> Any:
        invocation = _invocation(args)
        if invocation is None:
            return hook(module, args, *kwargs)
        shown = invocation.inputs(args[1:])
        with under_autocast(invocation.autocast):
            result = hook(module, shown.full, *kwargs)
        if kwargs and result is not None:
            result, *kwargs = result
        args = (invocation, *invocation.take(shown.after(_as_tuple(result))))
        return (args, *kwargs) if kwargs else args

    return on_block


def forward_hook(hook: Hook) -> Hook:
    """Return ``hook`` for a block, which may be registered with or without keyword arguments."""

    def on_block(module: nn.Module, args: tuple[Any, ...], *others: Any) -> Any:
        invocation = _invocation(args)
        if invocation is None:
            return hook(module, args, *others)
        *kwargs, output = others
        inputs = invocation.seen_inputs(args[1:])
        is_tuple = isinstance(output, tuple)
        outputs = invocation.forms.outputs(output if is_tuple else (output,))
        is_one = len(outputs.full) == 1
        with under_autocast(invocation.autocast):
            result = hook(module, inputs.full, *kwargs, outputs.full[0] if is_one else outputs.full)
        if result is not None and is_one:
            result = (result,)
        inputs.require_unchanged()
        values = outputs.after(result).values
        return values if is_tuple else values[0]

    return on_block


def backward_hook(hook: Hook, forms: BlockForms) -> Hook:
    """Return ``hook`` for the backward of one call of a block."""

    def on_block(module: nn.Module, grad_input: Sequence[Any], grad_output: Sequence[Any]) -> Any:
        outputs = forms.outputs(grad_output, are_gradients=True)
        if not grad_input:  # no input needs a gradient
            return hook(module, grad_input, outputs.full)
        # The first argument is the invocation, which has no gradient.
        inputs = forms.inputs(grad_input[1:], are_gradients=True)
        result = hook(module, inputs.full, outputs.full)
        return (None, *inputs.after(_as_tuple(result)).values)

    return on_block


def backward_pre_hook(hook: Hook, forms: BlockForms) -> Hook:
    """Return ``hook`` for the backward of one call of a block."""

    def on_block(module: nn.Module, grad_output: Sequence[Any]) -> Any:
        outputs = forms.outputs(grad_output, are_gradients=True)
        return outputs.after(_as_tuple(hook(module, outputs.full))).values

    return on_block


def _as_tuple(result: Any) -> Any:
    return result if result is None or isinstance(result, tuple) else (result,)
