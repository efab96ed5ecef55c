"""Views of the user's module: its tensors by name, its forward with its signature, its methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


class SignedForward:
    """A method with the signature of the model's own forward, on instances.

    Tools read it to see which inputs the model takes (``inspect.signature(module.forward)``).
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: Any, owner: type | None = None) -> Callable[..., Any]:
        if module is None:
            return self._function
        # Not a bound method, which cannot have its own signature.
        bound = functools.partial(self._function, module)
        bound.__signature__ = module._sp_state.signature  # type: ignore[attr-defined]
        return bound


class NamedTensors(Mapping[str, Tensor]):
    """Parameters or buffers by name, looked up in their modules at the moment of use."""

    def __init__(self, modules: Mapping[str, nn.Module], kind: str) -> None:
        # Includes every name of a tied tensor, as in checkpoints.
        self._owners = {
            f"{path}.{name}" if path else name: (getattr(module, kind), name)
            for path, module in modules.items()
            for name, value in getattr(module, kind).items()
            if value is not None
        }

    def __getitem__(self, name: str) -> Tensor:
        owner, attribute = self._owners[name]
        value: Tensor = owner[attribute]
        return value

    def current(self) -> list[Tensor]:
        """Return all current tensors, in order."""
        # Instead of values(), which looks up each name: every call reads all parameters.
        return [owner[attribute] for owner, attribute in self._owners.values()]

    def replace(self, name: str, value: Tensor) -> None:
        """Replace the object of ``name``."""
        owner, attribute = self._owners[name]
        owner[attribute] = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def tied_names(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Return groups of two or more names of one tensor."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


class ModelMethods(nn.Module):
    """Methods of ``nn.Module`` that models override, as the model's own class defines them.

    ``train`` keeps norms frozen or merges adapters, ``_load_from_state_dict`` renames weights of
    older checkpoints. They run on this module, which has the parameters and buffers.
    """

    _sp_original: nn.Module


OPERATORS = ("__getitem__", "__setitem__", "__len__", "__iter__", "__contains__", "__reversed__")
"""Methods that Python looks up only in the class, and that ``nn.Module`` does not have."""


def of_the_model(name: str) -> Callable[..., Any]:
    """Return a method that runs the one of the original's class on the module."""

    def method(self: ModelMethods, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self._sp_original), name)(self, *args, **kwargs)

    method.__name__ = name
    return method


# Not those that list modules, since all modules must be listed, nor _apply: that of recurrent
# layers collects parameters of the original model, which has none.
for _name in (
    *("train", "eval", "requires_grad_", "parameters", "named_parameters", "apply"),
    *("to", "type", "cpu", "cuda", "float", "double", "half", "bfloat16"),
    *("state_dict", "load_state_dict", "get_extra_state", "set_extra_state"),
    *("_save_to_state_dict", "_load_from_state_dict"),
):
    setattr(ModelMethods, _name, of_the_model(_name))
