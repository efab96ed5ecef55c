"""The user's model after compilation, whose parameters have no data.

Its own ``generate`` runs on the compiled module.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sp_compiler.base.errors import ArgumentError, UnsupportedError
from sp_compiler.module.parameters import are_held_by_modules_alone, optimizers_of
from sp_compiler.trace.arguments import bound_call
from sp_compiler.trace.environment import check_capturable

_TAKEN = "_sp_compiler_taken"
# Methods that raise an error after compilation. Hooks registered on modules of the model would be
# lost; the model's own forward would run without data. eval() calls train().
_LOST_HOOKS = (
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"),
)
_RAISING = ("forward", "train")
# Attributes of its parameters that may be read. Not ``is_leaf``, so that an optimizer, which reads
# it, raises an error.
_KNOWN = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "grad", "nbytes"),
        *("itemsize", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested"),
        *("size", "dim", "numel", "nelement", "element_size", "stride", "get_device", "__len__"),
        *("is_floating_point", "is_complex", "is_contiguous"),
    )
)


def check_not_taken(model: nn.Module) -> None:
    """Raise an error for a model that cannot be compiled (again).

    Raises:
        ArgumentError: it is not a module; it or a part of it was compiled before; an optimizer
            holds its parameters.
        UnsupportedError: a module inside the model has a hook.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if hasattr(model, "_sp_layout"):
        raise ArgumentError("the model is a compiled module already; compile the original model")
    if _TAKEN in vars(model):
        raise ArgumentError(
            "this model was compiled before and its parameters now belong to that compiled module; "
            "build the model again, or use the compiled module"
        )
    _check_parts_not_taken(model)
    check_capturable(model)
    # It would continue to update the old parameters, whose memory is gone.
    holders = [] if are_held_by_modules_alone(model) else optimizers_of(model.parameters())
    if holders:
        raise ArgumentError(
            f"an optimizer ({type(holders[0]).__name__}) holds the parameters of the model, "
            "which are replaced; create it after sp_compiler.compile, from the compiled module's "
            "parameters()"
        )


def _check_parts_not_taken(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_sp_layout"):
            raise ArgumentError(
                f"module {name!r} of the model is a compiled module; compile the whole model from "
                "its original parts instead"
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, _TAKEN, False):
            raise ArgumentError(
                f"parameter {name!r} belongs to another model that was compiled before; two "
                "compiled modules cannot share one: compile one module that holds both models, or "
                "give this one a copy (copy.deepcopy before compiling)"
            )


class TakenParameter(nn.Parameter):
    """A parameter of the model after its compilation: only its metadata can be read.

    A plain parameter on ``meta`` would fail silently: an optimizer would train nothing, a
    ``state_dict`` would be saved without data, a layer of the model would return arbitrary memory.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.__name__
        if name == "__get__":  # the getter of an attribute
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name not in _KNOWN:
            _raise_taken()
        return super().__torch_function__(func, types, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TakenParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TakenParameter:
        result = memo[id(self)] = _taken_parameter(self)
        vars(result).update(vars(self))
        return result


def _taken_parameter(parameter: Tensor) -> TakenParameter:
    return TakenParameter(_plain(parameter), parameter.requires_grad)


class Original:
    """A model that raises an error when it is called, or when its parameters are used except for
    their metadata.

    Args:
        model: the model to take over; its parameters are replaced.
        mirror: the tree with the same names that holds the parameters now.
    """

    def __init__(self, model: nn.Module, mirror: nn.Module) -> None:
        self.model = model
        self._own = {name: vars(model)[name] for name in _RAISING if name in vars(model)}
        # Marks are on the objects, not in a list, so that they are freed with the model.
        vars(model)[_TAKEN] = True
        kept = {id(parameter) for parameter in mirror.parameters()}
        for parameter in model.parameters():
            setattr(parameter, _TAKEN, True)
            # On several ranks, other parameters replace them. If a user has already put them into
            # groups for an optimizer, it would train parameters that no forward reads.
            if id(parameter) not in kept and type(parameter) is nn.Parameter:
                parameter.__class__ = TakenParameter
        self._put_to_sleep(mirror)

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own forward, which is hidden except during capture."""
        return self._own.get("forward") or MethodType(type(self.model).forward, self.model)

    @property
    def argument_names(self) -> Collection[str]:
        """Names in the signature of the model's forward."""
        return inspect.signature(self.forward).parameters

    def bound_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name.

        Raises:
            ArgumentError: the model's forward does not take them.
        """
        call = bound_call(self.forward, args, kwargs, type(self.model).__name__)
        bound = call.arguments
        for name, parameter in call.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return bound

    @contextlib.contextmanager
    def awake(
        self,
        mirror: nn.Module,
        computed_as: Mapping[int, tuple[torch.dtype, torch.device]],
        absent_dtype: torch.dtype | None,
    ) -> Iterator[nn.Module]:
        """Context with the model ready for capture: shapes, dtypes, modes and buffers of
        ``mirror``.

        Its parameters have the device but no memory: only their metadata may be read.
        ``computed_as`` has, by ``id``, the compute dtype and device of parameters if they differ
        from their own. ``absent_dtype`` is the compute dtype of other stages of a pipeline, if it
        is not that of their parameters.
        """
        model = self.model
        # The model's own modes, which the user may have set on single modules.
        modes = [module.training for module in model.modules()]
        # Inside the try: even this may run out of memory, and the model must be put to sleep again.
        try:
            self._restore_methods()
            # The user switches the mode of the mirror, and calls write into its buffers.
            for module, twin in zip(model.modules(), mirror.modules(), strict=True):
                module.training = twin.training
                module._buffers.update(twin._buffers)
            # A stage of a pipeline has only some parameters; all others are taken to be on the same
            # device.
            present = next(mirror.parameters(), None)
            device = None if present is None else present.device
            self._install(
                mirror,
                lambda parameter: _without_memory(parameter, computed_as, device, absent_dtype),
            )
            yield model
        finally:
            self._put_to_sleep(mirror)
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode

    def cast_absent(self, mirror: nn.Module, cast: Callable[[Tensor], Tensor]) -> None:
        """Apply ``cast``, which was applied to ``mirror``, to parameters that other stages of a
        pipeline hold, since every stage captures the full model."""
        held = {id(parameter) for parameter in mirror.parameters()}

        def make(parameter: Tensor) -> TakenParameter:
            if id(parameter) in held:
                return _taken_parameter(parameter)
            # Tried on a tensor with memory: without, a move to another device raises an error.
            dtype = cast(torch.empty(0, dtype=parameter.dtype)).dtype
            return TakenParameter(_plain(parameter).to(dtype), parameter.requires_grad)

        self._install(mirror, make)

    def give_back(self, mirror: nn.Module) -> None:
        """Restore the model, with the unsharded parameters of ``mirror``."""
        self._install(mirror, _unsharded_parameter)
        self._restore_methods()
        del vars(self.model)[_TAKEN]
        for parameter in self.model.parameters():
            vars(parameter).pop(_TAKEN, None)

    def _put_to_sleep(self, mirror: nn.Module) -> None:
        self._install(mirror, _taken_parameter)
        vars(self.model).update(dict.fromkeys(_RAISING, _raise_taken))
        for module in self.model.modules():
            vars(module).update(dict.fromkeys(_LOST_HOOKS, _raise_taken))

    def _restore_methods(self) -> None:
        for module in self.model.modules():
            for name in _LOST_HOOKS:
                del vars(module)[name]
        for name in _RAISING:
            del vars(self.model)[name]
        vars(self.model).update(self._own)

    def _install(self, mirror: nn.Module, make: Any) -> None:
        """Replace every parameter of the model by ``make(the mirror's parameter)``, preserving
        ties."""
        made: dict[int, nn.Parameter] = {}
        for module, twin in zip(self.model.modules(), mirror.modules(), strict=True):
            for name, parameter in twin._parameters.items():
                # A stage of a pipeline lacks the parameters of other stages; the model still has
                # their shapes.
                source = module._parameters[name] if parameter is None else parameter
                if source is None:
                    continue
                # By identity: tied parameters must be one object in the capture, by which ties are
                # found.
                if id(source) not in made:
                    value = make(source)
                    if not isinstance(value, nn.Parameter):
                        value = nn.Parameter(value, source.requires_grad)
                    setattr(value, _TAKEN, True)
                    made[id(source)] = value
                module._parameters[name] = made[id(source)]


_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def move_hooks(source: nn.Module, target: nn.Module) -> None:
    """Move hooks of the root module to the compiled module."""
    for table in _HOOK_TABLES:
        target.__dict__[table] = copy.copy(source.__dict__[table])


def _plain(parameter: Tensor) -> Tensor:
    """Return a meta tensor with the global shape of ``parameter``."""
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _unsharded_parameter(parameter: nn.Parameter) -> Tensor:
    """Return a replicated parameter in its original form: itself, or the local tensor of a
    DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _without_memory(
    parameter: Tensor,
    computed_as: Mapping[int, tuple[torch.dtype, torch.device]],
    absent_on: torch.device | None,
    absent_dtype: torch.dtype | None,
) -> Tensor:
    """Return a tensor of the global shape on the parameter's device with freed storage.

    ``absent_on``, ``absent_dtype``: device and dtype of parameters that other stages of a pipeline
    hold; ``None`` for their own dtype.
    """
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    dtype, device = computed_as.get(id(parameter), (parameter.dtype, local.device))
    if device.type == "meta" and absent_on is not None:
        device = absent_on
        if absent_dtype is not None and dtype.is_floating_point:
            dtype = absent_dtype
    if device.type == "meta":
        return _plain(parameter).to(dtype)
    tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
    # Not on meta: the capture must see the device, and refuse code that reads values of a weight.
    tensor.untyped_storage().resize_(0)
    return tensor


def generate(
    module: nn.Module, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call the ``generate`` of the class of ``model`` on ``module``, without a cache.

    Raises:
        UnsupportedError: the class has no such method, or the model has a separate encoder.
    """
    kind = type(model)
    own = getattr(kind, "generate", None)
    if own is None:
        raise UnsupportedError(
            f"{kind.__name__} has no generate(); call the compiled module on whole sequences"
        )
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(
            "generate() runs the encoder separately, which is not possible in a compiled model; "
            "load module.full_state_dict(), which all ranks must call, into a new model and "
            "generate with that"
        )
    # Transformers looks up methods on the class of the object, and they call super(). An object of
    # both classes, which shares its attributes with the module, has all of them.
    members = {"__call__": _call_with_few_arguments}
    face: Any = object.__new__(type(kind.__name__, (type(module), kind), members))
    object.__setattr__(face, "__dict__", module.__dict__)
    uncached = {"use_cache": False} if hasattr(model, "generation_config") else {}
    return own(face, *args, **{**kwargs, **uncached})


def _call_with_few_arguments(face: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the module without ``return_dict`` if it has the model's default."""
    # If an argument goes into **kwargs, torch.export leaves no sizes open, and the growing sequence
    # would be compiled for every length.
    own = getattr(getattr(face, "config", None), "return_dict", None)
    if own is not None and kwargs.get("return_dict") is own:
        del kwargs["return_dict"]
    module_class = type(face).__bases__[0]
    return module_class.__call__(face, *args, **kwargs)


def _raise_taken(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "this model was compiled by sp_compiler and its parameters belong to the module that "
        "sp_compiler.compile returned. Use that instead: call it, train and evaluate it, register "
        "hooks on it, give its parameters() to the optimizer, save its full_state_dict(), load "
        "with its load_state_dict() or load_pretrained(). Change the model itself, for example by "
        "resize_token_embeddings(), before the compilation"
    )
