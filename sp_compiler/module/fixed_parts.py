"""Fixed parts of a compiled model: errors if a user tries to change its modules or adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import UnsupportedError

# Methods of PEFT that change the set of adapters, or which of them are active.
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
# Methods of HuggingFace's models that replace modules by ones of another size.
_RESIZES = frozenset(("resize_token_embeddings", "resize_position_embeddings"))


def refuse_other_module(name: str, path: str) -> NoReturn:
    """Raise the error for a module or parameter ``name`` set, added or removed at ``path``."""
    raise UnsupportedError(
        f"cannot set, add or remove {name!r} of module {path or '(model)'!r}: the modules of a "
        "compiled model are fixed; change the model before sp_compiler.compile"
    )


def refuse_other_buffer(name: str, path: str, value: Any) -> NoReturn:
    """Raise the error for a buffer ``name`` of the module at ``path`` that is set to ``None``, or
    no longer to ``None``."""
    was, now = ("a tensor", "None") if value is None else ("None", "a tensor")
    raise UnsupportedError(
        f"cannot set buffer {name!r} of module {path or '(model)'!r}, which was {was}, to {now}: "
        "compiled code reads the same buffers in every call; set it before sp_compiler.compile"
    )


def refuse_other_forward(path: str) -> NoReturn:
    """Raise the error for a ``forward`` set on the module at ``path``, which would never run."""
    raise UnsupportedError(
        f"cannot set 'forward' of module {path!r}: it is part of compiled code; set it on the "
        "model before sp_compiler.compile"
    )


class FixedContainer:
    """Base class of mirrored containers, whose methods would change ``_modules`` directly.

    All methods except slicing raise :class:`~sp_compiler.base.errors.UnsupportedError`.
    """

    _sp_path: str

    def insert(self, index: int, module: nn.Module) -> NoReturn:
        """Raise an error."""
        refuse_other_module(str(index), self._sp_path)

    def __delitem__(self, key: Any) -> NoReturn:
        refuse_other_module(str(key), self._sp_path)

    def clear(self) -> NoReturn:
        """Raise an error."""
        refuse_other_module("*", self._sp_path)

    def __getitem__(self, key: Any) -> Any:
        # torch would construct another mirror.
        if not isinstance(key, slice):
            return super().__getitem__(key)  # type: ignore[misc]
        modules = [*vars(self)["_modules"].values()][key]
        return (
            nn.Sequential(*modules) if isinstance(self, nn.Sequential) else nn.ModuleList(modules)
        )


def refuse_other_parameters(
    named: Mapping[str, Tensor], current: Sequence[Tensor], *, divided: bool
) -> None:
    """Raise an error if a call would compute with other tensors than the module's parameters.

    Args:
        named: the parameters by name.
        current: the same parameters, in order.
        divided: whether they are DTensors over the ranks.

    Raises:
        UnsupportedError: names the first of them.
    """
    kinds = set(map(type, current))
    # By their few types, since models have hundreds of parameters and every call checks them.
    if any(_is_other(kind, divided=divided) for kind in kinds):
        others = (n for n, value in named.items() if _is_other(type(value), divided=divided))
        _refuse_parameter(next(others))


def refuse_untied(named: Mapping[str, Tensor], ties: Iterable[Sequence[str]]) -> None:
    """Raise an error if parameters are no longer tied that were so when a program was compiled: it
    reads the first for all of them.

    Raises:
        UnsupportedError: names the first of them.
    """
    for first, *others in ties:
        for name in others:
            # A stage of a pipeline may have only one of them.
            both = named.get(first), named.get(name)
            if both[0] is not both[1] and None not in both:
                raise UnsupportedError(
                    f"parameters {first!r} and {name!r} are no longer tied, as they were when the "
                    "model was compiled: set both to the same nn.Parameter, or untie them in the "
                    "model before sp_compiler.compile"
                )


def _is_other(kind: type[Tensor], *, divided: bool) -> bool:
    return not issubclass(kind, DTensor) if divided else kind is Tensor


def refuse_no_parameters(named: Mapping[str, Tensor]) -> None:
    """Raise an error if a program would be compiled for other tensors in place of parameters.

    Raises:
        UnsupportedError: names the first of them.
    """
    for name, value in named.items():
        # They may be of the right tensor type, such as those of state_dict().
        if not isinstance(value, nn.Parameter):
            _refuse_parameter(name)


def _refuse_parameter(name: str) -> NoReturn:
    raise UnsupportedError(
        f"another tensor was substituted for parameter {name!r} (torch.func.functional_call): a "
        "compiled module computes with its own parameters, which are divided over the ranks, and "
        "writes their gradients into .grad. Load other weights with module.load_state_dict(state), "
        "keep several in copies (copy.deepcopy(module)), or use functional_call on the original "
        "model"
    )


def refuse_change(original: nn.Module, name: str) -> None:
    """Raise an error if ``name`` is a method of a library that changes modules of ``original``.

    Raises:
        UnsupportedError: says what to do instead.
    """
    if name in _ADAPTER_CHANGES:
        _refuse_adapter_change(original, name)
    if name in _RESIZES and _home(original, name).partition(".")[0] == "transformers":
        raise UnsupportedError(
            f"{name}() would replace parameters of a compiled model, which are fixed: resize "
            "before sp_compiler.compile. To resize trained weights, build the model again, call "
            "its load_state_dict(state) with state = module.full_state_dict(), and its own "
            f"{name}()"
        )


def is_needless(original: nn.Module, name: str) -> bool:
    """Return whether ``name`` is Transformers' method that hooks embeddings for its activation
    checkpointing, which compiled code does not use."""
    # The name first: reading a property would compute it, without parameters in the original.
    if name != "enable_input_require_grads":
        return False
    return _home(original, name).partition(".")[0] == "transformers"


def _home(original: nn.Module, name: str) -> str:
    """Return the module that defines the method, or ``""``."""
    return getattr(getattr(original, name, None), "__module__", None) or ""


def _refuse_adapter_change(original: nn.Module, name: str) -> None:
    """Raise an error if ``name`` is a method of PEFT, rather than one of the user's model."""
    home = _home(original, name)
    if home.partition(".")[0] != "peft" and home != "transformers.integrations.peft":
        return
    raise UnsupportedError(
        f"{name}() would change the adapters of a model that is compiled with them. Load weights "
        "of an adapter by peft.set_peft_model_state_dict(module, peft.load_peft_weights("
        "folder)); to merge, unload or switch adapters, build the PEFT model again, call its "
        "load_state_dict(state) with state = module.full_state_dict(), and its own "
        f"{name}()"
    )
