"""What differs between two calls, in words for the user: why a module is compiled again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from sp_compiler.ir.text import dtype_name
from sp_compiler.runtime.keys.call_key import Attribute, CallKey, buffer_text

_MANY = 3


def differences(
    old: CallKey,
    new: CallKey,
    modules: Iterable[str],
    parameters: Iterable[str],
    buffers: Iterable[str],
    before: Callable[[Attribute], str],
) -> list[str]:
    """Return the facts of ``new`` that differ from those of ``old``, except the arguments.

    Args:
        old: key of a call.
        new: key of a later one.
        modules: paths of the modules that the keys describe, in order.
        parameters: names of their parameters, in order.
        buffers: names of their buffers, in order.
        before: returns the value, as text, that an attribute had before the user set it.
    """
    changed = []
    if old.training != new.training:
        named = [name or "(model)" for name in modules]
        changed.append(_mode(named, new.training))
    # A stage of a pipeline keeps some of the parameters that the model was compiled with.
    if len(old.parameters) == len(new.parameters):
        changed += _of_parameters(list(parameters), old, new)
    if len(old.buffers) == len(new.buffers):
        changed += _of_buffers(buffers, old, new)
    if old.autocast != new.autocast:
        kinds = [f"{device} {dtype_name(dtype)}" for device, dtype in new.autocast]
        changed.append(f"autocast {', '.join(kinds)}" if kinds else "no autocast")
    changed += _of_attributes(old, new, before)
    if old.loss_only != new.loss_only:
        changed.append("the loss alone" if new.loss_only else "all outputs")
    if old.default_dtype != new.default_dtype:
        changed.append(f"default dtype {dtype_name(new.default_dtype)}")
    return changed


def _of_parameters(names: Sequence[str], old: CallKey, new: CallKey) -> list[str]:
    changed = []
    dtypes = {dtype for dtype, _ in new.parameters}
    pairs = list(zip(names, old.parameters, new.parameters, strict=True))
    others = [name for name, before, now in pairs if before[0] != now[0]]
    if others:
        which = "all parameters" if len(others) == len(names) else listed(others)
        kinds = sorted(map(dtype_name, dtypes))
        changed.append(f"dtype {kinds[0]} of {which}" if len(kinds) == 1 else f"dtypes of {which}")
    if any(before[1] != now[1] for _, before, now in pairs):
        trained = [name for name, _, now in pairs if now[1]]
        frozen = [name for name, _, now in pairs if not now[1]]
        changed.append(f"requires_grad of {_which(trained, frozen, 'parameter')}")
    return changed


def _of_buffers(names: Iterable[str], old: CallKey, new: CallKey) -> list[str]:
    pairs = zip(names, old.buffers, new.buffers, strict=True)
    others = [f"{name} {buffer_text(now)}" for name, before, now in pairs if before != now]
    return [f"buffer {listed(others)}"] if others else []


def _of_attributes(old: CallKey, new: CallKey, before: Callable[[Attribute], str]) -> list[str]:
    was, now = dict(old.attributes), dict(new.attributes)
    changed = []
    for attribute in dict.fromkeys((*now, *was)):
        if was.get(attribute) == now.get(attribute):
            continue
        texts = [
            values[attribute].short() if attribute in values else before(attribute)
            for values in (now, was)
        ]
        # If both texts are equal, it is another object.
        was_text = f"was {texts[1]}" if texts[0] != texts[1] else "a different object than before"
        changed.append(f"{'.'.join(filter(None, attribute))} = {texts[0]} ({was_text})")
    return changed


def _mode(names: Sequence[str], training: bytes) -> str:
    pairs = list(zip(names, training, strict=True))
    train = [name for name, flag in pairs if flag]
    evaluated = [name for name, flag in pairs if not flag]
    if not train or not evaluated:
        return "train()" if train else "eval()"
    if len(train) <= len(evaluated):
        return f"train() of {listed(train)} alone"
    return f"eval() of {listed(evaluated)} alone"


def _which(chosen: Collection[str], rest: Collection[str], kind: str) -> str:
    """Return the shorter list of the two, in words."""
    if not rest:
        return f"all {kind}s"
    if not chosen:
        return f"no {kind}"
    few = len(chosen) <= len(rest)
    return f"{listed(chosen)} alone" if few else f"all {kind}s but {listed(rest)}"


def listed(names: Collection[str]) -> str:
    """Return the first names, and how many more there are."""
    shown = ", ".join(list(names)[:_MANY])
    return f"{shown} and {len(names) - _MANY} more" if len(names) > _MANY else shown
