"""The text of a method, cut where ranks communicate."""

from __future__ import annotations

import pytest

from sp_compiler.codegen.module_text import wrapped
from sp_compiler.inductor.split import split_method

METHOD = """\
@staticmethod
def backward(tp, saved, grad_y):
    (
        w, x,
    ) = saved
    device = x.device

    # mlp
    doubled = torch.relu(x) * 2  # recomputed (4, 8) f32
    pending = tp.start_all_gather(doubled, "S(0)", "R")  # ==> (8, 8) f32
    scaled = torch.exp(grad_y) + torch.arange(8, device=device)
    doubled_t = doubled.t()
    del doubled
    grad_w = torch.mm(doubled_t, scaled)
    gathered = pending.wait()  # <== (8, 8) f32
    grad_x = torch.mm(gathered, w)
    del gathered

    return (grad_w, grad_x)"""

FUNCTIONS = """\
@staticmethod
@inductor
def backward_1(tp, x):
    # mlp
    doubled = torch.relu(x) * 2  # recomputed (4, 8) f32

    return doubled
----
@staticmethod
@inductor
def backward_2(tp, grad_y, device, doubled):
    scaled = torch.exp(grad_y) + torch.arange(8, device=device)
    doubled_t = doubled.t()
    grad_w = torch.mm(doubled_t, scaled)

    return grad_w
----
@staticmethod
def backward(tp, saved, grad_y):
    (
        w, x,
    ) = saved
    device = x.device

    doubled = Mlp.backward_1(tp, x)
    pending = tp.start_all_gather(doubled, "S(0)", "R")  # ==> (8, 8) f32
    grad_w = Mlp.backward_2(tp, grad_y, device, doubled)
    del doubled
    gathered = pending.wait()  # <== (8, 8) f32
    grad_x = torch.mm(gathered, w)
    del gathered

    return (grad_w, grad_x)"""


def test_what_lies_between_collectives_becomes_a_function() -> None:
    """Unused values are not returned, a product alone stays, and names die where they died."""
    assert "\n----\n".join(split_method("Mlp", METHOD, wrapped)) == FUNCTIONS


def test_products_can_stay_as_written() -> None:
    """What is left is compiled, where it is worth it."""
    method = """\
@staticmethod
def forward(tp, x, w, seed):
    h = torch.exp(x) * 2
    y = torch.mm(h, w)
    del h
    z = tp.dropout(y + 1, seed, 0.1, 0, 0, 2)
    total = tp.add_product(torch.relu(z) * 2, z, w)
    return (total,), ()"""
    first, second, rest = split_method("Mlp", method, wrapped, products=False)
    assert first.endswith("    h = torch.exp(x) * 2\n\n    return h")
    assert second.endswith("    z = tp.dropout(y + 1, seed, 0.1, 0, 0, 2)\n\n    return z")
    assert (
        rest
        == """\
@staticmethod
def forward(tp, x, w, seed):
    h = Mlp.forward_1(tp, x)
    y = torch.mm(h, w)
    del h
    z = Mlp.forward_2(tp, y, seed)
    total = tp.add_product(torch.relu(z) * 2, z, w)
    return (total,), ()"""
    )


def test_the_functions_are_not_cut_again() -> None:
    *_, method = split_method("Mlp", METHOD, wrapped)
    assert split_method("Mlp", method, wrapped) == [method]


@pytest.mark.parametrize(
    ("statement", "functions"),
    [
        ("y = torch.exp(x)", 0),  # one kernel in eager code, too
        ("y = torch.mm(x.t(), x).reshape(-1)", 0),
        ("y = torch.mm(x, x) + 1 + x", 1),
        ("y = tp.dropout(x, seed, 0.1, 0, 0, 2)", 1),  # a chain of operators by itself
        ("y = tp.shard(x, 'R', 'S(0)') * x", 1),
        ("y = tp.vocab_embedding(x, x, 8)", 0),  # looks at the ids
        ("y = tp.reduce(x, 'sum') * 2 + x", 0),
        ("y = x == 3", 0),
        ("y = (x == 3).to(x.dtype) * x", 1),
    ],
)
def test_what_is_worth_a_function(statement: str, functions: int) -> None:
    method = f"@staticmethod\ndef forward(tp, x, seed):\n    {statement}\n    return (y,), ()"
    assert len(split_method("Mlp", method, wrapped)) == functions + 1


def test_a_comparison_does_not_part_two_functions() -> None:
    method = """\
@staticmethod
def forward(tp, x):
    h = torch.exp(x) * 2
    mask = h > 1
    y = torch.where(mask, h, x)
    return (y,), ()"""
    function, _ = split_method("Mlp", method, wrapped)
    assert "    mask = h > 1\n    y = torch.where(mask, h, x)\n" in function


def test_a_name_that_is_bound_anew_is_passed_and_returned() -> None:
    method = """\
@staticmethod
def forward(tp, x):
    h = torch.exp(x) * 2
    h = tp.all_reduce(h, "P", "R")
    h = torch.exp(h) + x
    return (h,), ()"""
    first, second, rest = split_method("Mlp", method, wrapped)
    assert "def forward_1(tp, x):" in first
    assert "def forward_2(tp, h, x):" in second
    assert second.endswith("return h")
    assert "h = Mlp.forward_2(tp, h, x)" in rest


def test_open_sizes_are_passed_where_they_are_known() -> None:
    """For shapes that are computed from them: an argument may have half of all rows."""
    method = """\
@staticmethod
def backward(tp, saved, grad):
    (x, size0) = saved
    h = torch.exp(x) * grad
    return (h,)"""
    function, rest = split_method("Mlp", method, wrapped, ["size0", "size1"])
    assert "def backward_1(tp, x, grad, size0):" in function
    assert "h = Mlp.backward_1(tp, x, grad, size0)" in rest
