"""The module tree that the user sees: the model's own names, holding the distributed parameters."""

from __future__ import annotations

import copy
import functools
import inspect
from types import MethodType
from typing import Any, NoReturn, TypeVar, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.placement import I, Placement
from sp_compiler.module.dtensors.patches import refuse_to_pickle
from sp_compiler.module.fixed_parts import (
    FixedContainer,
    is_needless,
    refuse_change,
    refuse_other_buffer,
    refuse_other_forward,
    refuse_other_module,
)
from sp_compiler.module.hooks.block_hooks import Invocation
from sp_compiler.module.hooks.hooked_module import KINDS, HookedModule, run_block
from sp_compiler.module.hooks.state_hooks import move_state_hooks
from sp_compiler.module.parameters import (
    distributed_parameter,
    from_loaded,
    to_true_chunk,
)
from sp_compiler.module.views import OPERATORS, ModelMethods, of_the_model
from sp_compiler.runtime.group import TensorParallelGroup
from sp_compiler.runtime.keys.set_attributes import Presence, SetAttributes
from sp_compiler.runtime.reductions import DeferredGradients

# Set by ``fully_shard`` on each module for torch.compile; no forward of a model reads them.
_FSDP_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class Layout:
    """Storage of the parameters of one compiled module; shared by all modules of its tree.

    Attributes:
        group: the ranks over which they are stored.
        placements: placement of every placed parameter, by name.
        blocks: paths of the modules that run as blocks; ``None`` before compilation.
        attributes: attributes that were set on the model's modules after compilation.
        num_hooks: number of forward pre-hooks registered on modules, as by ``fully_shard``.
        calls_root: whether the root module is called; a pipeline calls stages instead.
        deferred: pending gradients under ``no_sync``.
        hooked: modules that have or had users' hooks, by path, without the root.
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.placements: dict[str, Placement] = {}
        self.blocks: frozenset[str] | None = None
        self.attributes = SetAttributes()
        self.num_hooks = 0
        self.calls_root = True
        self.deferred = DeferredGradients()
        self.hooked: dict[str, nn.Module] = {}

    def placement(self, path: str, name: str) -> Placement:
        """Return the placement of parameter ``name`` of the module at ``path``; ``I`` if it is not
        placed yet."""
        return self.placements.get(f"{path}.{name}" if path else name, I)

    def hooks(self) -> str:
        """Return the hooks of blocks as text; it must be equal on all ranks, since hooks gather
        values."""
        counts = {
            path: {kind.strip("_"): len(getattr(module, kind)) for kind in KINDS}
            for path, module in self.hooked.items()
        }
        return ", ".join(
            f"{count} {kind} on {path}"
            for path, by_kind in sorted(counts.items())
            for kind, count in by_kind.items()
            if count
        )


class MirrorModule(HookedModule, ModelMethods, nn.Module):
    """Mirror of one module of the model: same name, same children, same parameter names.

    Attributes of the model's own module (``config``, ``num_heads``) are read and set there; its
    methods run on this module, which has the parameters. ``isinstance`` is true for the classes of
    both, because it is used to choose weights: those that an optimizer does not decay, those to
    initialise, the statistics that ``torch.optim.swa_utils.update_bn`` collects, the adapters that
    PEFT saves. ``forward`` runs compiled code if this is a block; other modules cannot be called
    separately.
    """

    def __init__(self, original: nn.Module, path: str, layout: Layout) -> None:
        super().__init__()
        # Not by ``nn.Module.__setattr__``, which would register it as a child, with a second set of
        # names.
        self.__dict__["_sp_original"] = original
        self.__dict__["_sp_path"] = path
        self.__dict__["_sp_layout"] = layout
        self.training = original.training

    @property
    def __class__(self) -> type:
        # A copy that is being filled has no original yet.
        original = self.__dict__.get("_sp_original")
        return type(self) if original is None else type(original)

    @__class__.setter
    def __class__(self, derived: type) -> None:
        # ``fully_shard`` derives a class from the visible one, which must be the true one instead.
        object.__dict__["__class__"].__set__(self, _rebased(derived, self))

    def forward(self, *values: Any, **named: Any) -> Any:
        """Run as a block: ``forward(invocation, *values)``."""
        if named or not values or not isinstance(values[0], Invocation):
            raise UnsupportedError(
                f"module {self._sp_path!r} is part of a compiled model and cannot be called alone; "
                "call the compiled model, or compile the part that you need"
            )
        return run_block(self, values[0], values[1:])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Like ``nn.Module.zero_grad``; also drops gradients that ``no_sync`` left unreduced."""
        self._sp_layout.deferred.drop(self.parameters())
        super().zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_sp_original")
            # A copy that is being filled has no original yet.
            if original is None or name.startswith("_sp_"):
                raise
            refuse_change(original, name)
            if is_needless(original, name):
                return lambda: None
            # Properties and methods read parameters (``device``, ``num_parameters()``).
            member = inspect.getattr_static(type(original), name, None)
            if isinstance(member, property) and member.fget is not None:
                return member.fget(self)
            # Bound to this module: bound to the original, they would find parameters without
            # memory.
            if inspect.isfunction(member) and name not in vars(original):
                return MethodType(member, self)
            return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_sp_original")
        own = name in self.__dict__ or name in self._buffers or hasattr(nn.Module, name)
        if name == "forward" and self._sp_path:
            refuse_other_forward(self._sp_path)
        is_known = original is not None and name in self._buffers
        if is_known and (value is None) != (self._buffers[name] is None):
            refuse_other_buffer(name, self._sp_path, value)
        # nn.Module sets attributes in its constructor, before there is an original.
        if original is None or own or name.startswith("_sp_") or name in _FSDP_MARKS:
            return super().__setattr__(name, value)
        if isinstance(value, nn.Module) or name in self._modules:
            refuse_other_module(name, self._sp_path)
        if isinstance(value, nn.Parameter) or name in self._parameters:
            self._check_parameter(name, value)
            return super().__setattr__(name, value)
        # If forward reads the attribute, it is part of the cache key from now on: forward may
        # branch on it.
        self._sp_layout.attributes.set(self._sp_path, original, name, value)
        return setattr(original, name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Raise an error: modules cannot be added to a compiled model.

        Raises:
            UnsupportedError: the modules of a compiled model are fixed.
        """
        refuse_other_module(name, self._sp_path)

    def __delattr__(self, name: str) -> None:
        if name in self._modules or name in self._parameters or name in self._buffers:
            refuse_other_module(name, self._sp_path)
        original = self.__dict__.get("_sp_original")
        # Set on the original by __setattr__ or by the model's constructor.
        if name not in self.__dict__ and name not in self._buffers and name in vars(original):
            self._sp_layout.attributes.set(self._sp_path, original, name, Presence.ABSENT)
            return delattr(original, name)
        return super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Replace a parameter of the model.

        Raises:
            UnsupportedError: the model has no parameter of this name, or one of another shape or
                placement.
        """
        if name not in self._parameters:
            # For example by pruning and older weight norms, which compute a weight from new
            # parameters.
            raise UnsupportedError(
                f"cannot add parameter {name!r} to module {self._sp_path or '(model)'!r}: the "
                "parameters of a compiled model are fixed. Prune (torch.nn.utils.prune) or "
                "reparametrize the model before sp_compiler.compile"
            )
        self._check_parameter(name, param)
        super().register_parameter(name, param)

    def _check_parameter(self, name: str, value: Any) -> None:
        """Raise an error unless ``value`` can replace the current parameter."""
        present = self._parameters.get(name)
        if (
            isinstance(present, Tensor)
            and isinstance(value, Tensor)
            and value.shape == present.shape
            and (self._sp_layout.group.mesh is None or _same_layout(present, value))
        ):
            return
        raise UnsupportedError(
            f"cannot set parameter {name!r} of module {self._sp_path or '(model)'!r}: a compiled "
            "model's parameters keep their shapes and placements; copy_() into the existing one, "
            "or change the model before sp_compiler.compile"
        )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # FSDP2 derives a class for each module that it is applied to, whose __deepcopy__ asserts.
        if issubclass(cls, FSDPModule):
            cls.__deepcopy__ = _refuse_to_copy  # type: ignore[assignment, method-assign]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # By default, copy would call __reduce_ex__, which raises. The result is put into the memo
        # before attributes are copied, since children and parents refer to each other.
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        # The group of ranks is shared.
        memo[id(self._sp_layout.group)] = self._sp_layout.group
        for name, value in self.__dict__.items():
            result.__dict__[name] = copy.deepcopy(value, memo)
        # Copies of plain parameters have no gradients, but copies of DTensors do.
        for parameter in result.__dict__["_parameters"].values():
            if parameter is not None:
                parameter.grad = None
        return result

    def _get_name(self) -> str:
        return type(self._sp_original).__name__

    def extra_repr(self) -> str:
        return self._sp_original.extra_repr()

    # Checkpoints contain true shapes, with rows in true order.

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self._sp_layout.group.mesh is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        before = set(destination)
        # keep_vars=True, to identify parameters: the model's own method may rename them.
        super()._save_to_state_dict(destination, prefix, True)
        own_names = {id(parameter): name for name, parameter in self._parameters.items()}
        for key in [key for key in destination if key not in before]:
            value = destination[key]
            if isinstance(value, Tensor) and not keep_vars:
                destination[key] = value.detach()
            if isinstance(value, DTensor) and id(value) in own_names:
                placement = self._sp_layout.placement(self._sp_path, own_names[id(value)])
                if not placement.is_in_order:
                    destination[key] = to_true_chunk(value, placement, self._sp_layout.group)
                refuse_to_pickle(destination[key])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Registered last, after the user's hooks and those of the model's own method, which may
        # rename weights.
        last = self.register_load_state_dict_pre_hook(MirrorModule._place_loaded)
        try:
            super()._load_from_state_dict(*args, **kwargs)
        finally:
            last.remove()

    def _place_loaded(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, parameter in self._parameters.items():
            value = state_dict.get(prefix + name)
            if isinstance(parameter, DTensor) and isinstance(value, Tensor):
                state_dict[prefix + name] = from_loaded(
                    value,
                    parameter,
                    self._sp_layout.placement(self._sp_path, name),
                    self._sp_layout.group,
                )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UnsupportedError(
            "a compiled module cannot be pickled: it holds a process group and generated code; "
            "save module.state_dict() and compile the model again after loading"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        raise UnsupportedError(
            "a compiled module cannot become TorchScript: it calls generated code; script or trace "
            "the model before its compilation, or a new one with the weights of full_state_dict()"
        )


def fill_mirror(root: MirrorModule, original: nn.Module, layout: Layout) -> None:
    """Give ``root`` mirrored children, distributed parameters and buffers of ``original``.

    A module or a parameter that appears twice appears twice in the mirror.
    """
    # By identity: modules and weights that the model shares must be shared in the mirror too.
    mirrors: dict[int, MirrorModule] = {id(original): root}
    parameters: dict[int, nn.Parameter] = {}
    for path, module in original.named_modules():
        mirror = mirrors.setdefault(id(module), root)
        move_state_hooks(module, mirror)
        for name, child in module._modules.items():
            if child is not None and id(child) not in mirrors:
                child_path = f"{path}.{name}" if path else name
                mirrors[id(child)] = mirror_class(MirrorModule, child)(child, child_path, layout)
            mirror._modules[name] = None if child is None else mirrors[id(child)]
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in parameters:
                parameters[id(parameter)] = distributed_parameter(parameter, layout.group)
            mirror._parameters[name] = None if parameter is None else parameters[id(parameter)]
        mirror._buffers.update(module._buffers)
        mirror._non_persistent_buffers_set |= module._non_persistent_buffers_set


def _same_layout(present: Tensor, value: Tensor) -> bool:
    """Return False if a DTensor would be replaced by a plain tensor, or by a DTensor on the same
    mesh with other placements."""
    if not isinstance(present, DTensor):
        return True
    if not isinstance(value, DTensor):
        return False
    # On another mesh it is a parameter of fully_shard, which swaps parameters in every forward.
    return value.device_mesh != present.device_mesh or value.placements == present.placements


def _rebased(derived: type, mirror: MirrorModule) -> type:
    """Return a class with the bases of ``derived``, with the mirror's in place of the original's.

    Raises:
        UnsupportedError: ``derived`` has no other base; ``fully_shard`` adds one.
    """
    seen, true = mirror.__class__, type(mirror)
    if seen not in derived.__bases__ or len(derived.__bases__) == 1:
        refuse_other_module("__class__", mirror._sp_path)
    # Without its own namespace, which a class of the model may fill in each subclass.
    bases = tuple(true if base is seen else base for base in derived.__bases__)
    return type(derived.__name__, bases, {})


_Mirror = TypeVar("_Mirror", bound=MirrorModule)


def mirror_class(base: type[_Mirror], module: nn.Module) -> type[_Mirror]:
    """Return ``base`` with what Python looks up only in the class of ``module``, such as
    ``module[0]`` of a ``Sequential`` or of a ``ParameterList``."""
    for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict):
        if isinstance(module, kind):
            return _container(base, kind)  # type: ignore[arg-type]  # mypy: no type[T] is hashable
    names = tuple(name for name in OPERATORS if hasattr(type(module), name))
    return _with_operators(base, names)  # type: ignore[arg-type]


@functools.cache
def _container(base: type[_Mirror], kind: type[nn.Module]) -> type[_Mirror]:
    return cast("type[_Mirror]", type(base.__name__, (FixedContainer, base, kind), {}))


@functools.cache
def _with_operators(base: type[_Mirror], names: tuple[str, ...]) -> type[_Mirror]:
    methods = {name: of_the_model(name) for name in names}
    return type(base.__name__, (base,), methods) if names else base


def _refuse_to_copy(module: MirrorModule, memo: dict[int, Any]) -> NoReturn:
    raise UnsupportedError(
        "copy.deepcopy of a module on a data axis: FSDP2 cannot copy the parameters it manages; "
        "compile the model again and call its load_state_dict(module.state_dict()), or get the "
        "unsharded weights from module.full_state_dict()"
    )
