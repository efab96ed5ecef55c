"""What a compiled model has for good: errors where a user would change its modules or adapters."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from sp_compiler.base.errors import UnsupportedError

# Methods of PEFT that change which adapters there are, or which of them compute.
_ADAPTER_CHANGES = frozenset(
    (
        "add_adapter",
        "add_weighted_adapter",
        "delete_adapter",
        "disable_adapter",
        "disable_adapter_layers",
        "disable_adapters",
        "enable_adapter_layers",
        "enable_adapters",
        "inject_adapter",
        "load_adapter",
        "merge",
        "merge_adapter",
        "merge_and_unload",
        "set_adapter",
        "unload",
        "unmerge",
        "unmerge_adapter",
    )
)
# Of HuggingFace's models, which put modules of another size in place of theirs.
_RESIZES = frozenset(("resize_token_embeddings", "resize_position_embeddings"))


def refuse_other_module(name: str, path: str) -> NoReturn:
    """Raise the error for a module or parameter ``name`` set, added or removed at ``path``."""
    raise UnsupportedError(
        f"cannot set, add or remove {name!r} of module {path or '(model)'!r}: the modules of a "
        "compiled model are fixed; change the model before sp_compiler.compile"
    )


class FixedContainer:
    """Base class of mirrored containers, whose methods would change ``_modules`` directly.

    All methods but slicing raise :class:`~sp_compiler.base.errors.UnsupportedError`.
    """

    _sp_path: str

    def insert(self, index: int, module: nn.Module) -> NoReturn:
        """Never inserts one."""
        refuse_other_module(str(index), self._sp_path)

    def __delitem__(self, key: Any) -> NoReturn:
        refuse_other_module(str(key), self._sp_path)

    def clear(self) -> NoReturn:
        """Never removes one."""
        refuse_other_module("*", self._sp_path)

    def __getitem__(self, key: Any) -> Any:
        # torch would construct another mirror.
        if not isinstance(key, slice):
            return super().__getitem__(key)  # type: ignore[misc]
        modules = [*vars(self)["_modules"].values()][key]
        return (
            nn.Sequential(*modules) if isinstance(self, nn.Sequential) else nn.ModuleList(modules)
        )


def refuse_change(original: nn.Module, name: str) -> None:
    """Raise an error if ``name`` is a method of a library that changes modules of ``original``.

    Raises:
        UnsupportedError: says when to call it instead.
    """
    if name in _ADAPTER_CHANGES:
        _refuse_adapter_change(original, name)
    if name in _RESIZES and _home(original, name).partition(".")[0] == "transformers":
        raise UnsupportedError(
            f"{name}() would replace parameters of a compiled model, which are fixed: resize "
            "before sp_compiler.compile. To resize trained weights, build the model anew, call its "
            f"load_state_dict(state) with state = module.full_state_dict(), and its own {name}()"
        )


def _home(original: nn.Module, name: str) -> str:
    """Return the module that defines the method, or ``""``."""
    return getattr(getattr(original, name, None), "__module__", None) or ""


def _refuse_adapter_change(original: nn.Module, name: str) -> None:
    """Raise an error if ``name`` is a method of PEFT; the user's model may have a method of that
    name."""
    home = _home(original, name)
    if home.partition(".")[0] != "peft" and home != "transformers.integrations.peft":
        return
    raise UnsupportedError(
        f"{name}() would change the adapters of a model that is compiled with them. Weights of an "
        "adapter are loaded by peft.set_peft_model_state_dict(module, peft.load_peft_weights("
        "folder)); to merge, unload or switch adapters, build the PEFT model anew, call its "
        "load_state_dict(state) with state = module.full_state_dict(), and its own "
        f"{name}()"
    )
