"""Patches of what PyTorch's tracers lack or do wrong."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._dynamo import _trace_wrapped_higher_order_op
from torch._export.passes import replace_set_grad_with_hop_pass
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler.base.decisions import MODES
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.warn import in_library, is_library, user_line, warn


@contextlib.contextmanager
def powers_of_sizes() -> Iterator[None]:
    """Let the tracer make a product of sizes in which one occurs twice, as of a mean over (s, s).

    A pass divides by such a number without the tracer seeing how it is made; it then makes it of
    the sizes that it knows. sympy writes s * s as a power, which is all that the tracer lacks.
    """
    handlers = proxy_tensor._sympy_handlers()
    known = dict(handlers)
    handlers.setdefault(sympy.Pow, operator.pow)
    try:
        yield
    finally:
        # In place, for it is the tracer's own table.
        handlers.clear()
        handlers.update(known)


@functools.cache
def fix_states_of_lstms() -> None:
    """Give the last states of a decomposed LSTM the shape of its first ones, in this process.

    Up to PyTorch 2.12 the decomposition of a layer squeezes the batch instead of the dim that it
    has put before it, so that (batch, hidden) comes back as (1, batch, hidden). It runs wherever
    the sizes of a graph are open, in captures, passes and traces.
    """
    if TorchVersion(torch.__version__) >= "2.13":
        return
    original = decompositions.one_layer_lstm

    def one_layer(x: Tensor, states: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        outputs, last = original(x, states, *args, **kwargs)
        return outputs, tuple(
            state.reshape(first.shape) for first, state in zip(states, last, strict=True)
        )

    decompositions.one_layer_lstm = one_layer  # type: ignore[assignment]  # its arguments pass through


@contextlib.contextmanager
def patched_tracers() -> Iterator[None]:
    """Context of an export, with all patches that every model may need."""
    with (
        buffer_hooks_restored(),
        modules_left_as_they_are(),
        no_grad_kept_inside_autocast(),
        plain_index_under_vmap(),
    ):
        yield


@contextlib.contextmanager
def plain_index_under_vmap() -> Iterator[None]:
    """Let a tensor be indexed with the numbers that ``vmap`` hands out: ``ids[batch, query]``.

    transformers makes masks so. Torch indexes with an autograd function of its own, whose backward
    is meant for flex attention; neither its call nor a record of it can be traced under ``vmap``.
    The backward of the operator itself gives the same gradient.
    """
    # torch internals: the function that TransformGetItemToIndex calls, bound at its import.
    with mock.patch.object(
        _trace_wrapped_higher_order_op, "mod_index", torch.ops.aten.index.Tensor
    ):
        yield


@contextlib.contextmanager
def no_grad_kept_inside_autocast() -> Iterator[None]:
    """Let an export keep ``no_grad`` that a forward enters inside of ``autocast``.

    Torch cuts the graph where the grad mode changes and drops a part that does not begin so: these
    begin with the autocast, entered again. What is computed there would get a gradient.
    """
    original = replace_set_grad_with_hop_pass._is_set_grad_enabled_sub_mod
    enter = torch.amp.autocast_mode._enter_autocast

    def is_region(call: Any, omit_if_same_with_ambient: bool = False) -> Any:
        if call.op != "call_module":
            return False
        nodes = call.graph.owning_module.get_submodule(call.target).graph.nodes
        first = next((x for x in nodes if x.op != "placeholder" and x.target is not enter), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return original(call, omit_if_same_with_ambient)
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    # torch internals: _is_set_grad_enabled_sub_mod, which asks for the first node of a part.
    with mock.patch.object(
        replace_set_grad_with_hop_pass, "_is_set_grad_enabled_sub_mod", is_region
    ):
        yield


@contextlib.contextmanager
def modules_left_as_they_are() -> Iterator[None]:
    """Let a forward convert a module to the dtype and device that it has, and refuse others.

    Routers do so: ``self.gate = self.gate.to(torch.float32)``. Torch would put new tensors into the
    parameters, which it cannot do while they are traced.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, convert: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        # Asked of empty tensors: a parameter that is converted is another value in the graph, even
        # to what it is.
        with _disable_current_modes():
            old = [torch.empty(0, dtype=x.dtype, device=x.device) for x in tensors]
            pairs = list(zip(old, map(convert, old), strict=True))
        changed = [(x, new) for x, new in pairs if (x.dtype, x.device) != (new.dtype, new.device)]
        if not changed:
            return module
        try:
            return original(module, convert, recurse)
        except RuntimeError as error:
            own, new = changed[0]
            raise UnsupportedError(
                f"forward converts the {type(module).__name__} from {own.dtype} on {own.device} to "
                f"{new.dtype} on {new.device}, and parameters cannot change inside the compiled "
                "model; convert it once, before compiling"
            ) from error

    # torch internals: nn.Module._apply, through which all conversions go.
    with mock.patch.object(nn.Module, "_apply", apply):
        yield


@contextlib.contextmanager
def buffer_hooks_restored() -> Iterator[None]:
    """Drop the hook on assignments to buffers that an export leaves behind when it fails.

    Up to PyTorch 2.12 it stays for the rest of the process, on all modules, and ``torch.compile``
    breaks its graph at every assignment.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    known = dict(hooks)
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(known)


@contextlib.contextmanager
def warned_of_symbols_in_text() -> Iterator[None]:
    """Warn of text that the model makes of a number that no capture knows: ``print(x.item())``.

    Such text is made once, with the name of a symbol, such as "zuf0", instead of the number.
    """

    def warned(show: Callable[[Any], str]) -> Callable[[Any], str]:
        @functools.wraps(show)
        def shown(self: Any) -> str:
            # Torch itself prints symbols too, in errors and logs.
            by_user = not is_library(sys._getframe(1).f_code.co_filename)
            if by_user and free_unbacked_symbols(self):
                warn(
                    "the forward makes text of a number that depends on data; it is made once, at "
                    f"the capture, and has {show(self)!r} in place of the number: {user_line()}"
                )
            return show(self)

        return shown

    with contextlib.ExitStack() as stack:
        for symbol in (torch.SymInt, torch.SymFloat, torch.SymBool):
            stack.enter_context(mock.patch.object(symbol, "__repr__", warned(symbol.__repr__)))
        yield


@contextlib.contextmanager
def modes_answered(callers: Callable[[str], bool]) -> Iterator[None]:
    """Context in which a model that asks for a mode is told ``callers(mode)``, its caller's, not
    that of the capture."""

    def answering(mode: str) -> Callable[[], bool]:
        ask = MODES[mode]
        captured = ask()

        def answer() -> bool:
            # Where it differs from the capture's, the model has set it itself.
            is_callers = ask() is captured and asked_by_model()
            return callers(mode) if is_callers else ask()

        return answer

    grad, inference = answering("is_grad_enabled"), answering("is_inference_mode_enabled")
    # torch internals: torch.is_grad_enabled and torch.is_inference_mode_enabled. Neither shows in a
    # graph, nor is passed to modes of torch functions.
    with (
        mock.patch.object(torch, "is_grad_enabled", grad),
        mock.patch.object(torch, "is_inference_mode_enabled", inference),
    ):
        yield


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Context in which a model's ``inference_mode`` is ``no_grad``: the tracer would not notice it,
    and gradients would flow through what is computed there."""

    def enter(this: Any) -> None:
        this._inference_mode_context = (torch.no_grad if this.mode else torch.enable_grad)()
        this._inference_mode_context.__enter__()

    # torch internals: torch.inference_mode.__enter__, and where it keeps what it leaves at its end.
    with mock.patch.object(torch.inference_mode, "__enter__", enter):
        yield


def asked_by_model() -> bool:
    """Return whether a line outside of PyTorch has called the function that calls this one."""
    return not in_library(sys._getframe(2).f_code.co_filename)
