"""Patches for features that PyTorch's tracers lack, and for their bugs."""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import sympy
import torch
import torch._export.passes.replace_set_grad_with_hop_pass as grad_mode_regions
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._dynamo import _trace_wrapped_higher_order_op
from torch._functorch import eager_transforms
from torch.autograd import grad_mode
from torch.fx import Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.torch_version import TorchVersion
from torch.utils import _traceback
from torch.utils._python_dispatch import _disable_current_modes

from sp_compiler.base.autocast import autocast_dtype
from sp_compiler.base.decisions import MODES
from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.warn import in_library, is_library, user_line, warn
from sp_compiler.ops.alignments import CTC_LOSS


@contextlib.contextmanager
def powers_of_sizes() -> Iterator[None]:
    """Let the tracer compute a product in which a size occurs twice, as in a mean over (s, s).

    The tracer does not see how a pass computes such a divisor, and rebuilds it from the sizes that
    it knows. sympy writes s * s as a power, for which the tracer has no handler.
    """
    handlers = proxy_tensor._sympy_handlers()
    known = dict(handlers)
    handlers.setdefault(sympy.Pow, operator.pow)
    try:
        yield
    finally:
        # In place, since it is the tracer's own table.
        handlers.clear()
        handlers.update(known)


def generators_left_alone() -> contextlib.AbstractContextManager[Any]:
    """Context in which a derivative is traced without states of Philox generators, a twentieth of
    the trace of a small region, unless random numbers of a GPU become operators of the graph."""
    needed = torch._functorch.config.functionalize_rng_ops
    return contextlib.nullcontext() if needed else mock.patch.object(PhiloxStateTracker, "reset")


@functools.cache
def fix_states_of_lstms() -> None:
    """Give the final states of a decomposed LSTM the shape of its initial ones, in this process.

    Up to PyTorch 2.12 the decomposition of a layer squeezes the batch dim instead of the dim that
    it has inserted before it, so that (batch, hidden) comes back as (1, batch, hidden). It runs
    wherever the sizes of a graph are open: in captures, passes and traces.
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
    """Context of an export, with the patches that any model may need."""
    with (
        default_dtype_kept(),
        grad_modes_found_under_autocast(),
        modules_left_as_they_are(),
        plain_index_under_vmap(),
        derivatives_refused(),
        alignments_kept(),
        frames_made_once(),
    ):
        yield


def frames_made_once() -> contextlib.AbstractContextManager[Any]:
    """Context that caches frames: each node of a trace has a traceback of the entire stack, mostly
    the same as that of the node before."""
    frame = functools.cache(traceback.FrameSummary)

    def extract(tb: Sequence[Any], skip: int) -> traceback.StackSummary:
        frames = [frame(each["filename"], each["line"], each["name"]) for each in tb[skip:]]
        return traceback.StackSummary(reversed(frames))

    return mock.patch.object(_traceback, "_extract_symbolized_tb", extract)


@contextlib.contextmanager
def default_dtype_kept() -> Iterator[None]:
    """Refuse a forward that sets the default dtype: operators depend on it, a graph has none."""
    original = torch.set_default_dtype

    def set_default_dtype(dtype: torch.dtype) -> None:
        if dtype != torch.get_default_dtype() and asked_by_model():
            raise UnsupportedError(
                f"forward sets the default dtype to {dtype}, which the compiled model would not: "
                f"{user_line()}; name the dtype where tensors are made"
            )
        original(dtype)

    # torch internals: torch.set_default_dtype.
    with mock.patch.object(torch, "set_default_dtype", set_default_dtype):
        yield


@contextlib.contextmanager
def derivatives_refused() -> Iterator[None]:
    """Refuse a forward that differentiates with ``torch.func``; of its transforms, the tracer
    supports only ``vmap``."""

    def refuse() -> None:
        raise UnsupportedError(
            "forward differentiates with torch.func (grad, vjp, jvp, jacrev, ...), which cannot be "
            f"captured: {user_line()}; write the derivative by hand, or compute it outside of "
            "forward, from the outputs of the compiled model (torch.autograd.grad)"
        )

    # torch internals: the two contexts that all of these enter first. Torch's own errors do not
    # name a line, and after its error in jvp, requires_grad_ fails in this process.
    with (
        mock.patch.object(eager_transforms, "grad_increment_nesting", refuse),
        mock.patch.object(eager_transforms, "jvp_increment_nesting", refuse),
    ):
        yield


@contextlib.contextmanager
def alignments_kept() -> Iterator[None]:
    """Replace ``ctc_loss`` by our own operator: torch's has a result of unknown size."""

    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Tensor | Sequence[int],
        target_lengths: Tensor | Sequence[int],
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:
        # As in torch: float32 under autocast; a single sequence has no batch dim.
        if autocast_dtype(log_probs) is not None and log_probs.dtype.itemsize < 4:
            log_probs = log_probs.float()
        is_batch = log_probs.dim() == 3
        given = input_lengths, target_lengths
        lengths = [torch.as_tensor(each, device=targets.device).reshape(-1) for each in given]
        scores = log_probs if is_batch else log_probs.unsqueeze(1)
        losses = CTC_LOSS.overload(scores, targets, *lengths, blank, zero_infinity, 1)
        if reduction == 1:
            return (losses / lengths[1].clamp(min=1)).mean()
        if reduction == 2:
            return losses.sum()
        return losses if is_batch else losses.squeeze(0)

    # torch internals: torch.ctc_loss, which F.ctc_loss calls.
    with mock.patch.object(torch, "ctc_loss", ctc_loss):
        yield


@contextlib.contextmanager
def plain_index_under_vmap() -> Iterator[None]:
    """Let a tensor be indexed with the scalars that ``vmap`` passes: ``ids[batch, query]``.

    transformers makes masks this way. Torch indexes with its own autograd function, whose backward
    is meant for flex attention; neither its call nor a record of it can be traced under ``vmap``.
    The backward of the operator itself gives the same gradient.
    """
    # torch internals: the function that TransformGetItemToIndex calls, bound at its import.
    with mock.patch.object(
        _trace_wrapped_higher_order_op, "mod_index", torch.ops.aten.index.Tensor
    ):
        yield


@contextlib.contextmanager
def modules_left_as_they_are() -> Iterator[None]:
    """Let a forward convert a module to the dtype and device that it has already.

    Routers do so: ``self.gate = self.gate.to(torch.float32)``. Other conversions are refused: torch
    would put new tensors into the parameters, which it cannot do while they are traced.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, convert: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        tensors = (*module.parameters(recurse), *module.buffers(recurse))
        # Tried on empty tensors: a converted parameter would be a new value in the graph, even if
        # nothing changes.
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
def grad_modes_found_under_autocast() -> Iterator[None]:
    """Let export keep a ``no_grad`` inside of a region with autocast, which it would drop.

    Export splits the graph at changes of the grad mode, and enters the autocast again at the start
    of each part, before the change. It looks for the change only there.
    """

    def changes_mode(node: Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        part = node.graph.owning_module.get_submodule(str(node.target))
        # A part begins at a change, so it has at most one.
        changes = part.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
        if not changes or not omit_if_same_with_ambient:
            return bool(changes)
        return bool(changes[0].args[0] != torch.is_grad_enabled())

    with mock.patch.object(grad_mode_regions, "_is_set_grad_enabled_sub_mod", changes_mode):
        yield


@contextlib.contextmanager
def without_hooks_of_all_modules() -> Iterator[None]:
    """Context without the hooks that PyTorch itself registers for all modules, for example to count
    FLOPs by module.

    They run around the compiled model and its blocks in every call. In the capture, their
    operations would become part of the model.

    Raises:
        UnsupportedError: there are hooks by other code, which could run only in the capture.
    """
    # torch internals: torch.nn.modules.module._global_forward_hooks and its relatives.
    module = torch.nn.modules.module
    registered_as = {
        "forward_pre_hook": module._global_forward_pre_hooks,
        "forward_hook": module._global_forward_hooks,
        "full_backward_pre_hook": module._global_backward_pre_hooks,
        "full_backward_hook": module._global_backward_hooks,
    }
    with contextlib.ExitStack() as stack:
        for kind, hooks in registered_as.items():
            others = [hook for hook in hooks.values() if not _is_torch(hook)]
            if others:
                raise UnsupportedError(
                    f"a hook on all modules ({others[0]}, registered by "
                    f"torch.nn.modules.module.register_module_{kind}) cannot run "
                    "inside the compiled model; remove it, and put it on the compiled module "
                    "afterwards: hooks run there on the whole model, its blocks and parameters"
                )
            stack.enter_context(mock.patch.dict(hooks, clear=True))
        yield


def _is_torch(hook: Any) -> bool:
    return str(getattr(hook, "__module__", None)).partition(".")[0] == "torch"


@contextlib.contextmanager
def warned_of_symbols_in_text() -> Iterator[None]:
    """Warn of text that the model makes of a number unknown in the capture: ``print(x.item())``.

    Such text is made once, and shows the name of a symbol, such as "zuf0", instead of the number.
    """

    def warned(show: Callable[[Any], str]) -> Callable[[Any], str]:
        @functools.wraps(show)
        def shown(self: Any) -> str:
            # Torch itself prints symbols too, in errors and logs.
            by_user = not is_library(sys._getframe(1).f_code.co_filename)
            if by_user and free_unbacked_symbols(self):
                warn(
                    "the forward makes text of a number that depends on data; it is made once, in "
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
    """Context in which a model that queries a mode gets its caller's, ``callers(mode)``."""

    def answering(mode: str, is_models: Callable[[], bool]) -> Callable[[], bool]:
        ask = MODES[mode]
        captured = ask()

        def answer() -> bool:
            # If it differs from the capture's, the model has set it itself.
            is_callers = ask() is captured and asked_by_model() and not is_models()
            return callers(mode) if is_callers else ask()

        return answer

    with contextlib.ExitStack() as stack:
        entered = stack.enter_context(_gradients_enabled_by_model())
        grad = answering("is_grad_enabled", lambda: bool(entered))
        inference = answering("is_inference_mode_enabled", lambda: False)
        # torch internals: torch.is_grad_enabled and torch.is_inference_mode_enabled. Neither is
        # recorded in a graph, or passed to a TorchFunctionMode.
        stack.enter_context(mock.patch.object(torch, "is_grad_enabled", grad))
        stack.enter_context(mock.patch.object(torch, "is_inference_mode_enabled", inference))
        yield


@contextlib.contextmanager
def _gradients_enabled_by_model() -> Iterator[list[Any]]:
    """Context that yields the list of contexts by which the model currently enables gradients.

    The model's ``enable_grad`` changes nothing in the capture, which records gradients anyway, but
    it does for a caller that does not.
    """
    entered: list[Any] = []

    def enters(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def entering(this: Any, *args: Any) -> None:
            method(this, *args)
            # no_grad restores the mode from before with set_grad_enabled(True).
            is_put_back = sys._getframe(1).f_code.co_filename == grad_mode.__file__
            if getattr(this, "mode", True) and not is_put_back:
                entered.append(this)

        return entering

    def leaves(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def leaving(this: Any, *args: Any) -> Any:
            entered[:] = [each for each in entered if each is not this]
            return method(this, *args)

        return leaving

    # torch internals: torch.enable_grad and torch.set_grad_enabled. The latter is also used as a
    # function, after which nothing is left, and as a decorator, which leaves in __call__.
    enable, setting = torch.enable_grad, torch.set_grad_enabled
    with (
        mock.patch.object(torch.enable_grad, "__enter__", enters(enable.__enter__)),
        mock.patch.object(torch.enable_grad, "__exit__", leaves(enable.__exit__)),
        mock.patch.object(torch.set_grad_enabled, "__init__", enters(setting.__init__)),
        mock.patch.object(torch.set_grad_enabled, "__exit__", leaves(setting.__exit__)),
        mock.patch.object(torch.set_grad_enabled, "__call__", leaves(setting.__call__)),
    ):
        yield entered


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Context in which a model's ``inference_mode`` acts as ``no_grad``: the tracer would not
    notice it, and gradients would flow through the values computed there."""

    def enter(this: Any) -> None:
        this._inference_mode_context = (torch.no_grad if this.mode else torch.enable_grad)()
        this._inference_mode_context.__enter__()

    # torch internals: torch.inference_mode.__enter__, and the attribute of the context it exits.
    with mock.patch.object(torch.inference_mode, "__enter__", enter):
        yield


def asked_by_model() -> bool:
    """Return whether the caller of this function was called from outside of PyTorch."""
    return not in_library(sys._getframe(2).f_code.co_filename)
