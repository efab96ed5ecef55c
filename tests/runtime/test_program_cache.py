"""Keys of calls and the bounded store of compiled programs."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from sp_compiler.runtime import program_cache
from sp_compiler.runtime.keys.call_key import CallKey, Constant, call_key
from sp_compiler.runtime.program_cache import ProgramCache
from sp_compiler.trace.export import flatten_inputs

_IDS = torch.zeros(2, 3, dtype=torch.int64)


def _key(*args: Any, **kwargs: Any) -> CallKey:
    leaves, structure = flatten_inputs(args, kwargs)
    module = nn.Linear(2, 2)
    return call_key(module.modules(), module.parameters(), (), leaves, structure)


def test_order_of_keyword_arguments_does_not_matter() -> None:
    one, other = _key(a=_IDS, b=1), _key(b=1, a=_IDS)
    assert one == other
    assert hash(one) == hash(other)
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": _IDS}, {"a": _IDS[:1]}),
        ({"a": _IDS}, {"a": _IDS.int()}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, requires_grad=True)}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {"a": 0}),
        ({"a": [1, 2]}, {"a": (1, 2)}),
        ({"a": _IDS}, {"b": _IDS}),
        ({"a": {1}}, {"a": {2}}),
        ({"a": _IDS}, {"a": _IDS.to_sparse()}),
    ],
)
def test_what_tells_calls_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert _key(**one) != _key(**other)
    assert _key(**one).digest() != _key(**other).digest()
    assert _key(**one) == _key(**one)


def test_unhashable_and_incomparable_constants() -> None:
    class Opaque:
        def __eq__(self, other: object) -> bool:
            raise TypeError("not comparable")

        __hash__ = None  # type: ignore[assignment]

    value = Opaque()
    assert Constant(value) == Constant(value)
    assert Constant(value) != Constant(Opaque())
    assert "0x" not in Constant(value).text
    assert Constant(float("nan")) == Constant(float("nan"))


def test_modes_are_part_of_the_key() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())

    def key() -> CallKey:
        leaves, structure = flatten_inputs((_IDS,), {})
        return call_key(module.modules(), module.parameters(), (), leaves, structure)

    keys = [key()]
    module[1].eval()
    keys.append(key())
    module[0].bias.requires_grad_(False)
    keys.append(key())
    module.double()
    keys.append(key())
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key())
    assert len(set(keys)) == 5
    with torch.no_grad():
        assert key() == keys[3]


def test_the_store_is_bounded_and_warns_once() -> None:
    cache = ProgramCache[int](size=2)
    keys = [_key(a=number) for number in range(4)]
    cache.put(keys[0], 0)
    cache.put(keys[1], 1)
    assert cache.get(keys[0]) == 0
    with pytest.warns(UserWarning, match="more than 2 different kinds of inputs"):
        cache.put(keys[2], 2)
    assert [cache.get(key) for key in keys] == [0, None, 2, None]
    assert len(cache) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(keys[3], 3)


def test_ranks_agree_about_sets_and_devices() -> None:
    """A set has another order in each process, and each rank a device of its own."""
    names = {f"name{number}" for number in range(20)}
    listed = re.findall(r"name\d+", Constant(names).text)
    assert listed == sorted(names)
    one, other = (Constant(torch.device("cpu", index)) for index in (0, 1))
    assert one.text == other.text
    assert one != other
    one, other = (Constant({"on": [torch.device("cpu", index)]}) for index in (0, 1))
    assert one.text == other.text
    assert one != other


def test_the_text_of_a_tensor_is_its_values() -> None:
    """Without its device's index and its history, in which ranks may differ."""
    weight = torch.ones(2, requires_grad=True)
    text = Constant(weight * 2).text
    assert text == Constant(torch.full((2,), 2.0)).text != Constant(torch.ones(2)).text
    assert text.endswith(":cpu tensor([2., 2.])")


class _Short:
    """Open sizes that fit at most five rows."""

    def rejection(self, leaves: Any) -> str | None:
        return None if leaves[0].shape[0] <= 5 else "too long"


def test_what_a_forward_reads_is_looked_up_only_at_sizes_that_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At others the program that reads it is not valid: it may read past the end."""
    read = []

    def hold(_: Any, leaves: list[Any], __: Any) -> bool:
        read.append(len(leaves[0]))
        return True

    monkeypatch.setattr(program_cache, "hold", hold)
    rows = [torch.zeros(length, 3) for length in (2, 4, 6)]
    keys = [_key(x) for x in rows]
    cache = ProgramCache[int](size=4)
    decision: Any = "x[4, 0] > 0"
    cache.put(replace(keys[0], decisions=(decision,)), 0, _Short(), [decision])  # type: ignore[arg-type]
    found = [cache.decided(key, [x], {}) for key, x in zip(keys, rows, strict=True)]
    assert [key.decisions for key in found] == [(decision,), (decision,), ()]
    assert read == [2, 4]
