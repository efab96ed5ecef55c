"""Requirements on a model before its export, and temporary changes during the export."""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.fx.experimental import proxy_tensor

from sp_compiler.base.autocast import explicit_casts
from sp_compiler.base.decisions import callers_modes_kept
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.stored_attributes import Stored
from sp_compiler.base.warn import warn
from sp_compiler.trace.attributes.changes import Settled
from sp_compiler.trace.autograd_functions import FunctionCall, recorded_functions
from sp_compiler.trace.tracer_patches import fix_states_of_lstms, patched_tracers

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Warnings given per model, so that captures for several shapes give each warning once.
_WARNED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def check_capturable(model: nn.Module) -> None:
    """Raise an error for parts of a model that export would silently lose.

    Raises:
        UnsupportedError: a hook on a module inside the model, or a scripted module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"module {name or '(model)'!r} is a ScriptModule; pass an nn.Module"
            )
        lost = {
            kind: hook
            for kind in _HOOKS
            for hook in getattr(module, kind).values()
            if not _is_captured(hook) and not _is_without_effect(hook)
        }
        if name and lost:  # those of the root itself run around the compiled module
            advice = (
                "remove them, and put them on the compiled module afterwards: hooks run there on "
                "the whole model, its blocks and parameters"
            )
            # weight_norm, spectral_norm, pruning: they compute the weight, so they must run inside.
            if any(_module_of(hook).startswith("torch.nn.utils.") for hook in lost.values()):
                advice = (
                    "remove them (remove_weight_norm, for example), and use "
                    "torch.nn.utils.parametrizations or parametrize instead, which need no hooks"
                )
            raise UnsupportedError(
                f"module {name!r} ({type(module).__name__}) has hooks ({', '.join(lost)}), which "
                f"cannot run inside the compiled model; {advice}"
            )


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def _is_captured(hook: Any) -> bool:
    """Return whether a hook is part of the forward, and therefore of the graph.

    Transformers collects the logits of routers with such hooks, which stay on the model after its
    first call.
    """
    return _module_of(hook).partition(".")[0] == "transformers" and not _is_without_effect(hook)


def _is_without_effect(hook: Any) -> bool:
    """Return whether dropping a hook changes no value and no parameter's gradient.

    Transformers has such a hook, which makes the embeddings of a checkpointed model require a
    gradient.
    """
    return getattr(hook, "__name__", "") == "make_inputs_require_grads"


@contextlib.contextmanager
def export_context(
    model: nn.Module, *, use_cache: bool | None = None
) -> Iterator[list[FunctionCall]]:
    """Context in which a model is exported; it restores everything at its end.

    The root's own hooks run in the caller's module; gradients are recorded regardless of the
    caller's grad mode; autocast does not change.

    Args:
        use_cache: the caller's argument, if given; a cache is ignored with a warning.

    Yields:
        The list of calls of autograd functions, which grows while the model is exported.
    """
    fix_states_of_lstms()
    with contextlib.ExitStack() as stack:
        stack.enter_context(callers_modes_kept())
        # A first call under no_grad must capture the same graph as one in training.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_without_hooks(model))
        stack.enter_context(without_cache(model, asked=use_cache))
        stack.enter_context(_given_causal_hint())
        functions = stack.enter_context(recorded_functions())
        stack.enter_context(explicit_casts())
        stack.enter_context(_without_tensor_hooks())
        stack.enter_context(_integers_drawn_by_randint())
        stack.enter_context(_without_proxies_of_modules())
        stack.enter_context(_without_torch_warnings())
        stack.enter_context(patched_tracers())
        if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
            message = "gradient checkpointing set on the model is ignored"
            _warn_once(model, f"{message}: recompute= of sp_compiler governs")
        yield functions


def warn_of_attributes(model: nn.Module, settled: Settled, outside: Mapping[str, str]) -> None:
    """Warn of attributes, and of numbers ``outside`` of the model, that forward changes but a
    compiled call does not."""
    if outside:
        names = ", ".join(f"{name} ({how})" for name, how in outside.items())
        message = (
            "forward changes numbers outside of the model; results that depend on them stay as "
            "they are"
        )
        _warn_once(model, f"{message} now: {names}. Keep them in a buffer (register_buffer)")
    if settled.lost:
        _warn_once(
            model,
            "forward changes attributes of the model, and the compiled model will not: "
            f"{', '.join(f'{name} ({how})' for name, how in settled.lost.items())}. Results that "
            "depend on them stay as they are now. Keep state that changes in a buffer "
            "(register_buffer), and change it in place",
        )
    counted = [str(each) for each in settled.stored if each.how == "decide" and _is_count(each)]
    if counted:
        _warn_once(
            model,
            f"forward computes with numbers that it changes: {', '.join(counted)}. The model is "
            "compiled again for each of their values; keep such a number in a buffer "
            "(register_buffer), and change it in place",
        )


def _is_count(stored: Stored) -> bool:
    (value,) = stored.leaves or (None,)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    saved = [
        (module, kind, getattr(module, kind))
        for module in model.modules()
        for kind in _HOOKS
        if getattr(module, kind)
    ]
    for module, kind, hooks in saved:
        # torch internals: the four dictionaries of hooks on modules. Export calls hooks and records
        # their operations; a module has no public way to remove hooks and to restore their order.
        candidates = {} if module is model else hooks
        part_of_forward = ((key, hook) for key, hook in candidates.items() if _is_captured(hook))
        setattr(module, kind, OrderedDict(part_of_forward))
    try:
        yield
    finally:
        for module, kind, hooks in saved:
            setattr(module, kind, hooks)


@contextlib.contextmanager
def without_cache(model: nn.Module, *, asked: bool | None) -> Iterator[None]:
    """Force ``config.use_cache`` off: a key/value cache cannot leave a captured graph.

    ``asked``: the caller's argument ``use_cache``, which overrides the config's; ``None`` if it is
    not given.
    """
    # By identity: parts of a model may share its config, or have equal ones.
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            configs[id(config)] = config
    # Only on rank 0, since every rank has the same configuration. Other warnings are about the
    # module that a rank captures, which may be a stage that rank 0 does not have.
    is_missed = bool(configs) and _keeps_cache(model) if asked is None else asked
    if is_missed and not (dist.is_initialized() and dist.get_rank()):
        _warn_once(model, "use_cache=True is ignored: a compiled model keeps no cache")
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def _keeps_cache(model: nn.Module) -> bool:
    """Return whether a model with ``config.use_cache`` would return a cache."""
    # The configuration cannot tell: an encoder's has use_cache=True too, and that of many decoders
    # has is_decoder=False. Attention modules can. Layers without attention, such as Mamba's, have
    # no such flag.
    flags = [
        vars(module)[name]
        for module in model.modules()
        for name in ("is_causal", "is_decoder")
        if name in vars(module)
    ]
    return any(flags) or not flags


def _warn_once(model: nn.Module, message: str) -> None:
    warned = _WARNED.setdefault(model, set())
    if message not in warned:
        warned.add(message)
        warn(message)


@contextlib.contextmanager
def _without_torch_warnings() -> Iterator[None]:
    """Silence warnings of torch.export about its own code, which users cannot fix."""
    # About symbols of numbers that a forward reads, and mismatched shapes: our error names the line
    # of the model.
    names = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    logs = [logging.getLogger(name) for name in names]
    for log in logs:
        log.addFilter(_says_nothing)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
            # warn_of_attributes gives it in the user's terms.
            warnings.filterwarnings("ignore", r"The tensor attributes? .* assigned during export")
            yield
    finally:
        for log in logs:
            log.removeFilter(_says_nothing)


def _says_nothing(_: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def _without_tensor_hooks() -> Iterator[None]:
    """Refuse hooks on tensors, which a captured graph cannot express."""

    def refuse(tensor: Any, hook: Any) -> None:
        raise UnsupportedError(
            "forward calls Tensor.register_hook, and a hook on a tensor cannot run inside the "
            "compiled model; write a torch.autograd.Function whose backward does what the hook does"
        )

    # torch internals: Tensor.register_hook. Export would lose a hook on a fake tensor.
    with mock.patch.object(torch.Tensor, "register_hook", refuse):
        yield


@contextlib.contextmanager
def _integers_drawn_by_randint() -> Iterator[None]:
    """Make ``random_`` with bounds draw with ``randint``: its overload is named ``from``, a keyword
    that generated Python cannot use as an attribute."""
    original = torch.Tensor.random_

    def random_(tensor: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        # By name, since they may come in any order.
        bounds = (*args, *[kwargs[name] for name in ("from", "to") if name in kwargs])
        if not bounds or None in bounds or generator is not None:
            return original(tensor, *args, generator=generator, **kwargs)
        return tensor.copy_(torch.randint_like(tensor, *bounds))

    # torch internals: Tensor.random_. There is no other way to replace one overload.
    with mock.patch.object(torch.Tensor, "random_", random_):
        yield


@contextlib.contextmanager
def _without_proxies_of_modules() -> Iterator[None]:
    """Give the forward the model's own modules where one of them has two names, such as an
    activation that layers share.

    To know the name by which a module is read, torch's tracer would return a new proxy object for
    it each time: ``layer is self.layers[-1]`` and ``type(layer) is Layer`` would be false, reads of
    its attributes would go unseen, and a slice of a list would have layers of unknown names.
    """
    # torch internals: _ModuleStackTracer.enable_attr_proxy. The tracer sets it itself.
    never = property(lambda _: False, lambda _, wanted: None)
    with mock.patch.object(
        proxy_tensor._ModuleStackTracer, "enable_attr_proxy", never, create=True
    ):
        yield


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Context that disables hooks on saved tensors during compilation.

    With them, ``torch.utils.checkpoint`` counts the tensors that autograd saves. Tracing saves
    tensors too, but only in the first run, so the counts would differ.
    """
    aside = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        aside.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(aside):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def _given_causal_hint() -> Iterator[None]:
    """Context in which ``nn.TransformerEncoder`` does not compare its mask with a causal one.

    The mask itself is still used, so only a hint for faster kernels is lost.
    """
    # torch internals: nn.modules.transformer._detect_is_causal_mask. It reads values of the mask,
    # which a fake tensor does not have; no argument turns it off in every layer.
    module = torch.nn.modules.transformer
    original = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
    finally:
        module._detect_is_causal_mask = original
