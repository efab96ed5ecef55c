"""Operators with several forms: the same numbers, and the canonical operator in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.provenance import module_path
from sp_compiler.ir.fx import calls, is_getitem
from tests.helpers.normalized import body, captured_from, normalized, outputs, randn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _written(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y[:, :2] = x[:, 2:]
    y[:, 2:] = 2.0
    return y


def _spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x)


_CASES: list[tuple[Callable[[Tensor], Any], set[str]]] = [
    (lambda x: x.t() * 2, {"transpose.int", "mul.Tensor"}),
    (lambda x: x.type_as(x) * 2, {"mul.Tensor"}),
    (lambda x: x.type_as(torch.ones((), dtype=torch.float32)), {"_to_copy"}),
    (lambda x: x[:1].expand_as(x), {"slice.Tensor", "expand"}),
    (lambda x: x[:, ::2], {"reshape", "select.int"}),
    (lambda x: x[:, 1::2], {"reshape", "select.int"}),
    (lambda x: x[:, -3::2], {"reshape", "select.int"}),
    (lambda x: x[:, -7::2], {"reshape", "select.int"}),  # from the first on
    (lambda x: x[:, ::3], {"slice.Tensor"}),  # 3 does not divide 4
    (lambda x: x[:, 2::2], {"slice.Tensor"}),  # not all of it
    (lambda x: x.repeat(3, 1, 2), {"reshape", "expand"}),
    (lambda x: x.repeat_interleave(2, dim=0), {"reshape", "expand"}),
    (lambda x: _spectrum(x).conj().imag, {"fft_fft", "view_as_real", "neg", "select.int"}),
    (lambda x: _spectrum(x).conj().real, {"fft_fft", "view_as_real", "select.int"}),
    (
        lambda x: torch.view_as_real(_spectrum(x).conj().flatten().resolve_conj()),
        {"fft_fft", "conj_physical", "reshape", "view_as_real"},
    ),
    (lambda x: torch.fft.ihfft(x, norm="ortho").real, {"fft_rfft", "view_as_real", "select.int"}),
    (
        lambda x: torch.view_as_real(torch.fft.ihfft(x).resolve_conj()),
        {"fft_rfft", "conj_physical", "view_as_real"},
    ),
    (lambda x: F.adaptive_avg_pool1d(x, 1), {"mean.dim"}),
    (
        lambda x: F.adaptive_avg_pool2d(x[None].mT, (1, 1)),
        {"unsqueeze", "transpose.int", "mean.dim"},
    ),
    (lambda x: F.adaptive_avg_pool2d(x[None], (1, 2)), {"unsqueeze", "adaptive_avg_pool2d"}),
    (_written, {"zeros", "slice.Tensor", "slice_scatter", "full", "expand"}),
    (lambda x: torch.ops.aten.fill(x * 1, 3.0) + x, {"mul.Tensor", "full", "add.Tensor"}),
]


@pytest.mark.parametrize(("function", "operators"), _CASES)
def test_same_numbers_by_known_operators(
    function: Callable[[Tensor], Any], operators: set[str]
) -> None:
    x = randn(6, 4, grad=True)
    captured = normalized(function, x)
    torch.testing.assert_close(outputs(captured, x)[0], function(x), rtol=0, atol=0)
    graph = captured.module.graph
    found = {
        node.target._schema.name.split("::")[1] + _overload(node.target._overloadname)
        for node in calls(graph, *(node.target for node in graph.nodes))
        if not is_getitem(node)
    }
    assert found <= operators


_TRANSPOSED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w.T,
    lambda w: w.t(),
    lambda w: w.mT,
    lambda w: w.transpose(0, 1),
    lambda w: w.transpose(-1, 0),
    lambda w: w.permute(1, 0),
    lambda w: w.permute(-1, -2),
]
_NOT_TRANSPOSED: list[Callable[[Tensor], Tensor]] = [
    lambda w: w,
    lambda w: w.transpose(0, 0),
    lambda w: w.permute(0, -1),
    lambda w: w.expand(2, 4, 4).mT,
]


@pytest.mark.parametrize("spell", _TRANSPOSED)
@pytest.mark.parametrize("size", [(3, 4), (2, 3, 4)])
def test_product_with_a_transposed_weight_is_linear(
    spell: Callable[[Tensor], Tensor], size: tuple[int, ...]
) -> None:
    _assert_linear(spell, size, True)


@pytest.mark.parametrize("spell", _NOT_TRANSPOSED)
def test_other_products_stay(spell: Callable[[Tensor], Tensor]) -> None:
    _assert_linear(spell, (2, 3, 4), False)


def test_vector_times_a_transposed_weight_stays() -> None:
    _assert_linear(_TRANSPOSED[0], (4,), False)


def _assert_linear(
    spell: Callable[[Tensor], Tensor], size: tuple[int, ...], expected: bool
) -> None:
    """Of a square weight, so that a transposition too many or too few shows in the numbers."""
    x, w = randn(*size, grad=True), randn(4, 4, grad=True)
    captured = normalized(lambda x, w: x @ spell(w), x, w)
    found = list(calls(captured.module.graph, torch.ops.aten.linear.default))
    assert len(found) == expected
    torch.testing.assert_close(outputs(captured, x, w)[0], x @ spell(w), rtol=1e-14, atol=1e-15)


_B, _T, _S, _D, _F, _H, _K, _E = 2, 3, 4, 5, 6, 7, 8, 9
_EINSUMS: list[tuple[str, list[tuple[int, ...]], list[str]]] = [
    ("btd,df->btf", [(_B, _T, _D), (_D, _F)], ["%2 = aten.matmul(%0, %1) : f64[2, 3, 6]"]),
    ("df, btd -> btf", [(_D, _F), (_B, _T, _D)], ["%2 = aten.matmul(%1, %0) : f64[2, 3, 6]"]),
    ("...d,fd->...f", [(_B, _T, _D), (_F, _D)], ["%2 = aten.linear(%0, %1) : f64[2, 3, 6]"]),
    ("ij,jk", [(2, 3), (3, 4)], ["%2 = aten.matmul(%0, %1) : f64[2, 4]"]),
    (
        "btd,dhk->bthk",
        [(_B, _T, _D), (_D, _H, _K)],
        [
            "%2 = aten.reshape(%1, [5, 56]) : f64[5, 56]",
            "%3 = aten.matmul(%0, %2) : f64[2, 3, 56]",
            "%4 = aten.reshape(%3, [2, 3, 7, 8]) : f64[2, 3, 7, 8]",
        ],
    ),
    (
        "bthk,hkd->btd",
        [(_B, _T, _H, _K), (_H, _K, _D)],
        [
            "%2 = aten.reshape(%0, [2, 3, 56]) : f64[2, 3, 56]",
            "%3 = aten.reshape(%1, [56, 5]) : f64[56, 5]",
            "%4 = aten.matmul(%2, %3) : f64[2, 3, 5]",
        ],
    ),
    (
        "bthd,bshd->bhts",
        [(_B, _T, _H, _K), (_B, _S, _H, _K)],
        [
            "%2 = aten.transpose.int(%0, -3, -2) : f64[2, 7, 3, 8]",
            "%3 = aten.permute(%1, [-4, -2, -1, -3]) : f64[2, 7, 8, 4]",
            "%4 = aten.matmul(%2, %3) : f64[2, 7, 3, 4]",
        ],
    ),
    (
        "bte,btd->ebd",
        [(_B, _T, _E), (_B, _T, _D)],
        [
            "%2 = aten.transpose.int(%0, -2, -1) : f64[2, 9, 3]",
            "%3 = aten.matmul(%2, %1) : f64[2, 9, 5]",
            "%4 = aten.transpose.int(%3, -3, -2) : f64[9, 2, 5]",
        ],
    ),
    ("ebd,edf->ebf", [(_E, _B, _D), (_E, _D, _F)], ["%2 = aten.matmul(%0, %1) : f64[9, 2, 6]"]),
    (
        "egcm,emf->egcf",
        [(4, 2, 3, 5), (4, 5, 6)],
        [
            "%2 = aten.reshape(%0, [4, 6, 5]) : f64[4, 6, 5]",
            "%3 = aten.matmul(%2, %1) : f64[4, 6, 6]",
            "%4 = aten.reshape(%3, [4, 2, 3, 6]) : f64[4, 2, 3, 6]",
        ],
    ),
    (
        "t,d->td",
        [(3,), (4,)],
        [
            "%2 = aten.reshape(%0, [3, 1]) : f64[3, 1]",
            "%3 = aten.reshape(%1, [1, 4]) : f64[1, 4]",
            "%4 = aten.mul.Tensor(%2, %3) : f64[3, 4]",
        ],
    ),
    (
        "bthd,bthd->bth",
        [(_B, _T, _H, _K)] * 2,
        [
            "%2 = aten.mul.Tensor(%0, %1) : f64[2, 3, 7, 8]",
            "%3 = aten.sum.dim_IntList(%2, [-1]) : f64[2, 3, 7]",
        ],
    ),
    (
        "btd,df->bf",
        [(_B, _T, _D), (_D, _F)],
        [
            "%2 = aten.sum.dim_IntList(%0, [-2]) : f64[2, 5]",
            "%3 = aten.matmul(%2, %1) : f64[2, 6]",
        ],
    ),
    (
        "bd,df,fe->be",
        [(2, 3), (3, 4), (4, 5)],
        ["%3 = aten.matmul(%0, %1) : f64[2, 4]", "%4 = aten.matmul(%3, %2) : f64[2, 5]"],
    ),
]


@pytest.mark.parametrize(("equation", "shapes", "lines"), _EINSUMS)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], lines: list[str]) -> None:
    operands = [randn(*shape, grad=True) for shape in shapes]
    last = lines[-1].split()[0]
    found = body(_assert_einsum(equation, *operands))
    assert found == [*lines, f"output({last})"]


_SHAPES_OF_LETTERS = dict(zip("abcdefABC", (2, 3, 4, 5, 2, 3, 4, 2, 5), strict=True))


@pytest.mark.parametrize(
    "equation",
    [
        *("ab->ba", "abc->", "abc->b", "ab", "ba", "Ba", "aB"),
        *("ab,bc->ca", "ba,bc->ac", "ab,cb", "Ab,bc", "ab,bc->", "ab,cd->", "ab,cd->dbca"),
        *("abc,cd->abd", "cab,cd->abd", "abc,dc->dab", "a,ab->b", "a,a->", "a,a", "abc,c->ab"),
        *("abcd,cde->abe", "abcd,dce->bae", "abc,dec->abed", "abc,cde->eabd"),
        *("abc,abd->acd", "abc,abd->dac", "abcd,aecd->aceb", "abcd,acbe->ecad", "abc,abd->a"),
        *(",ab->ab", "ab,->ba", ",->", "ab,bc,cd,de", "ab,ab,ab->a", "a,ab,bc->c", "ab,cd,be->ce"),
    ],
)
def test_einsum_of_other_equations(equation: str) -> None:
    terms = equation.partition("->")[0].split(",")
    shapes = [[_SHAPES_OF_LETTERS[letter] for letter in term] for term in terms]
    _assert_einsum(equation, *(randn(*shape, grad=True) for shape in shapes))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        # Dims of size 1 that are broadcast, in one operand or in both; and that are not.
        ("btd,df->btf", [(2, 3, 1), (5, 6)]),
        ("btd,df->btf", [(1, 3, 5), (1, 6)]),
        ("btd,df->btf", [(1, 1, 1), (1, 1)]),
        ("btd,btd->btd", [(2, 1, 5), (1, 3, 5)]),
        ("btd,btf->btdf", [(2, 1, 5), (1, 3, 6)]),
        ("btd,bdf->btf", [(1, 3, 5), (2, 5, 6)]),
        ("...ij,...jk->...ik", [(5, 1, 2, 3), (4, 3, 2)]),
        # Dims without a letter.
        ("...,...->...", [(2, 3), (3,)]),
        ("...i->i", [(2, 3, 4)]),
        ("i...->...", [(2, 3, 4)]),
        ("b...d,d", [(2, 3, 4), (4,)]),
        # Diagonals.
        ("ii", [(3, 3)]),
        ("ii->i", [(3, 3)]),
        ("iii->i", [(3, 3, 3)]),
        ("iij,jk->ik", [(3, 3, 4), (4, 5)]),
        ("bii,bj->bij", [(2, 3, 3), (2, 4)]),
        # Nothing to sum.
        ("bd,df->bf", [(2, 0), (0, 3)]),
    ],
)
def test_einsum_of_unusual_operands(equation: str, shapes: list[tuple[int, ...]]) -> None:
    _assert_einsum(equation, *(randn(*shape, grad=True) for shape in shapes))


def test_einsum_along_a_path() -> None:
    """The path is a user's, or that of a package that finds cheap ones."""
    x, y, z = (randn(*shape, grad=True) for shape in ((2, 3), (3, 4), (4, 5)))
    product = torch.ops.aten.einsum.default
    function = lambda *args: product("ab,bc,cd->ad", args, path=[1, 2, 0, 1])  # noqa: E731
    captured = normalized(function, x, y, z)
    assert body(captured) == [
        "%3 = aten.matmul(%1, %2) : f64[3, 5]",
        "%4 = aten.matmul(%0, %3) : f64[2, 5]",
        "output(%4)",
    ]
    torch.testing.assert_close(outputs(captured, x, y, z)[0], x @ y @ z)


def test_einsum_of_integers_stays() -> None:
    x = torch.ones(2, 3, dtype=torch.int32)
    captured = normalized(lambda x: torch.einsum("ij->i", x), x)
    assert "einsum" in body(captured)[0]
    assert torch.equal(outputs(captured, x)[0], torch.einsum("ij->i", x))


def test_new_nodes_are_where_the_einsum_was() -> None:
    x, w = randn(2, 3, grad=True), randn(3, 4, 5, grad=True)
    function = lambda x, w: torch.einsum("td,dhk->htk", x, w)  # noqa: E731
    (original,) = calls(captured_from(function, x, w).module.graph, torch.ops.aten.einsum.default)
    graph = normalized(function, x, w).module.graph
    new = list(calls(graph, *(node.target for node in graph.nodes)))
    assert len(new) == 3
    for node in new:
        assert node.meta["origin"] == "normalize"
        assert node.meta["requires_grad"]
        assert node.meta["stack_trace"] == original.meta["stack_trace"]
        assert module_path(node) == module_path(original)


def _assert_einsum(equation: str, *operands: Tensor) -> Any:
    captured = normalized(lambda *args: torch.einsum(equation, *args), *operands)
    assert not list(calls(captured.module.graph, torch.ops.aten.einsum.default))
    (found,), expected = outputs(captured, *operands), torch.einsum(equation, *operands)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    tangent = randn(*expected.shape)
    grads = (torch.autograd.grad(y, operands, tangent) for y in (found, expected))
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)
    return captured


def test_gated_linear_unit() -> None:
    x = randn(2, 3, 4, grad=True)
    captured = normalized(lambda x: F.glu(x, 2), x)
    assert body(captured) == [
        "%1 = aten.split_with_sizes(%0, [2, 2], -1) : (f64[2, 3, 2], f64[2, 3, 2])",
        "%2 = getitem(%1, 0) : f64[2, 3, 2]",
        "%3 = getitem(%1, 1) : f64[2, 3, 2]",
        "%4 = aten.sigmoid(%3) : f64[2, 3, 2]",
        "%5 = aten.mul.Tensor(%2, %4) : f64[2, 3, 2]",
        "output(%5)",
    ]
    torch.testing.assert_close(outputs(captured, x)[0], F.glu(x))


def test_weight_norm() -> None:
    v, g = randn(4, 3, grad=True), randn(4, 1, grad=True)
    captured = normalized(lambda v, g: torch._weight_norm(v, g), v, g)
    assert body(captured) == [
        "%2 = aten.linalg_vector_norm(%0, 2, [-1], True) : f64[4, 1]",
        "%3 = aten.div.Tensor(%1, %2) : f64[4, 1]",
        "%4 = aten.mul.Tensor(%0, %3) : f64[4, 3]",
        "output(%4)",
    ]


@pytest.mark.parametrize("dim", [0, 1, 2, -2, -3, -1])
def test_the_last_dim_of_a_weight_norm_is_not_minus_one(dim: int) -> None:
    """-1 is the norm of the full weight."""
    v = randn(4, 3, 2, grad=True)
    g = randn(*(n if d == dim % 3 else 1 for d, n in enumerate(v.shape)), grad=True)
    for function in (torch._weight_norm, lambda v, g, dim: torch.norm_except_dim(v, 2, dim) * g):
        captured = normalized(lambda v, g: function(v, g, dim), v, g)  # noqa: B023
        torch.testing.assert_close(outputs(captured, v, g)[0], function(v, g, dim))


def _overload(name: str) -> str:
    return "" if name == "default" else f".{name}"


def test_new_tensors_keep_the_type_they_were_captured_with() -> None:
    """Whatever the default type is when the generated code runs."""
    x = randn(3)
    torch.set_default_dtype(torch.float64)
    try:
        captured = normalized(lambda x: x + torch.full((3,), 1e300), x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(outputs(captured, x)[0], x + 1e300, rtol=0, atol=0)


def test_a_tensor_like_an_activation_does_not_depend_on_it() -> None:
    captured = normalized(lambda x: torch.ones_like(x * 2), randn(3, 2, grad=True))
    assert not captured.placeholders


_IDS = torch.tensor([[[1, 0], [3, -100], [2, 2]], [[4, 1], [0, 0], [-100, 3]]])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1}, {"weight": torch.arange(1.0, 6)}])
def test_classes_in_dim_1(reduction: str, extra: dict[str, Any]) -> None:
    """A transpose that put them there is gone."""
    weight = {key: value.double() for key, value in extra.items() if isinstance(value, Tensor)}
    extra = {**extra, **weight, "reduction": reduction}
    flat, images = randn(2, 6, 5, grad=True), randn(2, 5, 3, 2, grad=True)
    probabilities = randn(2, 5, 3, 2).softmax(1)
    cases: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: F.cross_entropy(x.transpose(1, 2), _IDS.flatten(1), **extra), flat),
        (lambda x: F.cross_entropy(x, _IDS, **extra), images),
        (lambda x: F.cross_entropy(x, probabilities, **extra), images),
    ]
    for function, x in cases:
        captured = normalized(function, x)
        expected = function(x)
        (found,) = outputs(captured, x)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        grads = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    names = [node.target for node in normalized(*cases[0]).module.graph.nodes]
    assert torch.ops.aten.transpose.int not in names
