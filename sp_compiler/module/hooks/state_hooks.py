"""State-dict hooks that a model has before it is compiled: they rename, add or drop weights."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_TABLES = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_post_hooks")


def move_state_hooks(source: nn.Module, target: nn.Module) -> None:
    """Register the hooks of ``source`` for saving and loading on ``target``, its mirror."""

    def of_target(hook: Any) -> Any:
        # A method bound to ``source`` would find its parameters without memory.
        if isinstance(hook, MethodType) and hook.__self__ is source:
            return MethodType(hook.__func__, target)
        return hook

    for table in _TABLES:
        hooks = vars(source)[table]
        vars(target)[table].update({key: of_target(hook) for key, hook in hooks.items()})
    wrappers: Iterable[Any] = source._load_state_dict_pre_hooks.values()
    for wrapper in wrappers:
        hook = of_target(wrapper.hook)
        target.register_load_state_dict_pre_hook(
            hook if wrapper.with_module else partial(_without_module, hook)
        )


def _without_module(hook: Any, module: nn.Module, *args: Any) -> None:
    hook(*args)
