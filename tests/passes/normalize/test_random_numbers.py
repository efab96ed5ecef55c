"""Random numbers of all distributions are made of uniform ones, which a counter gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn import functional as F

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.passes.normalize import normalize
from tests.helpers.normalized import body, captured_from, normalized, outputs, randn, text
from tests.helpers.statistics import assert_counts, assert_distributed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
_SIZE = (128, 129)


def _drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7).div_(0.7)


def test_stochastic_depth() -> None:
    """One number a sequence, expanded over it; the branch keeps its rows of tokens."""
    captured = normalized(_drop_path, randn(4, 6, 8, grad=True))
    assert [ref.kind for ref in captured.refs] == ["input", "seed"]
    assert body(captured) == [
        "%2 = sp_compiler.uniform(%1, [4, 1, 1], torch.float64, 0, 0, 1) : f64[4, 1, 1]",
        "%3 = aten.sub.Tensor(%2, 0.7) : f64[4, 1, 1]",
        "%4 = aten.floor(%3) : f64[4, 1, 1]",
        "%5 = aten.abs(%4) : f64[4, 1, 1]",
        "%6 = aten.div.Tensor(%5, 0.7) : f64[4, 1, 1]",
        "%7 = aten.expand(%6, [4, 6, 1]) : f64[4, 6, 1]",
        "%8 = aten.mul.Tensor(%0, %7) : f64[4, 6, 8]",
        "output(%8)",
    ]


def test_sites_are_numbered_with_those_of_dropout() -> None:
    def function(x: Tensor) -> Tensor:
        return F.dropout(x + torch.randn_like(x), 0.5) * torch.rand(x.shape[0], 1, dtype=x.dtype)

    captured = normalized(function, randn(4, 5))
    assert body(captured) == [
        "%2 = sp_compiler.uniform(%1, [4, 5], torch.float64, 0, 0, 1) : f64[4, 5]",
        "%3 = aten.special_ndtri(%2) : f64[4, 5]",
        "%4 = aten.add.Tensor(%0, %3) : f64[4, 5]",
        "%5 = sp_compiler.dropout(%4, %1, 0.5, 1, 0, 1) : f64[4, 5]",
        "%6 = sp_compiler.uniform(%1, [4, 1], torch.float64, 2, 0, 1) : f64[4, 1]",
        "%7 = aten.mul.Tensor(%5, %6) : f64[4, 5]",
        "output(%7)",
    ]


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "feature dropout": lambda x: F.dropout1d(x, 0.5),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "gumbel softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "reparametrised": lambda x: torch.distributions.Normal(x, 2.0, validate_args=False).rsample(),
    "leaky by chance": lambda x: F.rrelu(x, training=True),
    "kept tokens": lambda x: x[:, torch.randperm(x.shape[1])[:3]],
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_composites(name: str) -> None:
    """Nothing is left that draws from torch's generator; a second run changes nothing."""
    x = randn(4, 6, 8, grad=True)
    captured = normalized(_FUNCTIONS[name], x)
    before = text(captured)
    assert "sp_compiler.uniform" in before
    normalize(captured)
    assert text(captured) == before
    with torch.random.fork_rng():
        (first,), state = outputs(captured, x, seed=3), torch.get_rng_state()
        torch.rand(())
        (again,) = outputs(captured, x, seed=3)
        torch.set_rng_state(state)
    assert torch.equal(first, again)
    assert not torch.equal(first, outputs(captured, x, seed=4)[0])
    first.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


# Distributions.

_CONTINUOUS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), stats.uniform()),
    "rand_like": (torch.rand_like, stats.uniform()),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), stats.uniform(-1, 4)),
    "randn": (lambda x: torch.randn(x.shape, dtype=x.dtype), stats.norm()),
    "randn_like": (torch.randn_like, stats.norm()),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), stats.norm(2, 3)),
    "normal": (lambda x: torch.normal(2.0, 3.0, x.shape, dtype=x.dtype), stats.norm(2, 3)),
    "normal, std": (lambda x: torch.normal(2.0, torch.full_like(x, 3)), stats.norm(2, 3)),
    "normal, mean": (lambda x: torch.normal(torch.full_like(x, 2), 3.0), stats.norm(2, 3)),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2), stats.expon(0, 0.5)),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(0, 0.25), stats.lognorm(0.25)),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_(1, 2), stats.cauchy(1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", _CONTINUOUS)
def test_distribution(name: str, dtype: torch.dtype) -> None:
    function, distribution = _CONTINUOUS[name]
    x = torch.zeros(_SIZE, dtype=dtype)
    (sample,) = outputs(normalized(function, x), x)
    assert (sample.shape, sample.dtype) == (x.shape, dtype)
    assert_distributed(sample, distribution.cdf)


def _of_weights(count: int, replacement: bool) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        weights = x.new_tensor([1.0, 0.0, 3.0, 4.0, 0.0]).expand(2048, 5)
        return torch.multinomial(weights, count, replacement)

    return function


_GEOMETRIC = [0.0, *(0.4 * 0.6**k for k in range(11)), 0.6**11]
# Not by keywords in a call, where "from" is one of Python's.
_NAMED_BOUNDS: Any = {"to": 7, "from": 2}
_DISCRETE: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), [0.7, 0.3]),
    "bernoulli, p": (lambda x: torch.bernoulli(x, 0.3), [0.7, 0.3]),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.3), [0.7, 0.3]),
    "bernoulli_, ps": (lambda x: torch.empty_like(x).bernoulli_(x + 0.3), [0.7, 0.3]),
    "bernoulli, bool": (lambda x: torch.zeros_like(x).bool().bernoulli_(0.3), [0.7, 0.3]),
    "never": (lambda x: torch.bernoulli(x, 0.0), [1.0, 0.0]),
    "always": (lambda x: torch.bernoulli(x, 1.0), [0.0, 1.0]),
    "randint": (lambda x: torch.randint(7, x.shape), [1 / 7] * 7),
    "randint, low": (lambda x: torch.randint(2, 7, x.shape), [0, 0, *[0.2] * 5]),
    "randint_like": (lambda x: torch.randint_like(x, 7), [1 / 7] * 7),
    "randint_like, low": (lambda x: torch.randint_like(x, 2, 7), [0, 0, *[0.2] * 5]),
    "random_": (lambda x: torch.empty_like(x).random_(2, 7), [0, 0, *[0.2] * 5]),
    "random_, named": (lambda x: torch.empty_like(x).random_(**_NAMED_BOUNDS), [0, 0, *[0.2] * 5]),
    "random_, to": (lambda x: torch.empty_like(x).long().random_(to=7), [1 / 7] * 7),
    "geometric_": (lambda x: torch.empty_like(x).geometric_(0.4), _GEOMETRIC),
    "multinomial": (_of_weights(1, False), [0.125, 0, 0.375, 0.5, 0]),
    "multinomial, replaced": (_of_weights(6, True), [0.125, 0, 0.375, 0.5, 0]),
    "multinomial, all": (_of_weights(3, False), [1 / 3, 0, 1 / 3, 1 / 3, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", _DISCRETE)
def test_discrete_distribution(name: str) -> None:
    function, probabilities = _DISCRETE[name]
    x = torch.zeros(_SIZE)
    (sample,) = outputs(normalized(function, x), x)
    expected = function(x)
    assert (sample.shape, sample.dtype) == (expected.shape, expected.dtype)
    # What is rare together, in a class that is large enough for the statistic.
    assert_counts(sample.clamp(max=len(probabilities) - 1), probabilities)


def test_draws_without_replacement_are_distinct_and_ordered_by_chance() -> None:
    x = torch.zeros(())
    (places,) = outputs(normalized(_of_weights(3, False), x), x)
    assert (places.sort(-1).values == torch.tensor([0, 2, 3])).all()
    assert_counts(places[:, 0], [0.125, 0, 0.375, 0.5, 0])


@pytest.mark.parametrize(("count", "replacement"), [(1, False), (2, True), (3, False)])
def test_no_class_of_weight_zero_is_drawn_for_want_of_others(count: int, replacement: bool) -> None:
    """Torch raises; the number drawn is no class, so that whatever looks it up raises."""
    weights = torch.zeros(4, 5)
    weights[0, :3] = 1
    captured = normalized(lambda w: torch.multinomial(w, count, replacement), weights)
    (places,) = outputs(captured, weights)
    assert int(places[0].max()) < 3
    assert places[1:].eq(5).all()


def test_permutations() -> None:
    x = torch.zeros(())
    captured = normalized(lambda x: torch.randperm(1000), x)
    (order,) = outputs(captured, x)
    assert torch.equal(order.sort().values, torch.arange(1000))
    (other,) = outputs(captured, x, seed=1)
    assert int((order == other).sum()) < 10


def test_half_types_never_reach_the_end_of_the_interval() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.zeros(_SIZE, dtype=dtype)
        (sample,) = outputs(normalized(torch.rand_like, x), x)
        assert sample.dtype is dtype
        assert 0 < float(sample.min()) < float(sample.max()) < 1
        (sample,) = outputs(normalized(lambda x: torch.empty_like(x).uniform_(), x), x)
        assert 0 < float(sample.min()) < float(sample.max()) < 1
        (normal,) = outputs(normalized(torch.randn_like, x), x)
        assert normal.dtype is dtype
        assert 3 < float(normal.abs().max()) < 6


# The same numbers given to eager.


def test_values_and_gradients_are_those_of_eager_with_the_same_numbers() -> None:
    def function(x: Tensor, u: Tensor, z: Tensor) -> Tensor:
        return (x.sigmoid() * u).tanh() + x * z * (u < 0.5)

    x = randn(4, 6, 8, grad=True)
    names = ("u", "z")
    numbers = normalized(lambda x: (torch.rand_like(x), torch.randn_like(x)), x)
    given = dict(zip(names, outputs(numbers, x, seed=5), strict=True))
    captured = normalized(lambda x: function(x, torch.rand_like(x), torch.randn_like(x)), x)
    (found,) = outputs(captured, x, seed=5)
    (grad,) = torch.autograd.grad(found.sum(), x)
    expected = function(x, **given)
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.normal(x, 1.0) * x,
        lambda x: torch.bernoulli(x.sigmoid()) * x,
        lambda x: torch.normal(0.0, x.abs()) * x,
    ],
)
def test_no_gradient_flows_to_what_a_distribution_is_told(
    function: Callable[[Tensor], Tensor],
) -> None:
    x = randn(4, 5, grad=True)
    (result,) = outputs(normalized(function, x), x)
    (grad,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(grad, (result / x).detach(), rtol=1e-12, atol=1e-12)


# What stays.


def test_eval_draws_nothing() -> None:
    captured = normalized(lambda x: F.rrelu(x) + F.dropout(x, 0.5, False), randn(4, 5))
    assert [ref.kind for ref in captured.refs] == ["input"]


def test_other_randomness_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"aten\.poisson\.default draws random numbers"):
        normalize(captured_from(lambda x: torch.poisson(x.abs()), randn(2, 3)))
    with pytest.raises(UnsupportedError, match=r"aten\.random\.default draws random numbers"):
        normalize(captured_from(lambda x: x.clone().random_(), randn(2, 3)))
    for draw in (torch.rand, torch.randn):
        with pytest.raises(UnsupportedError, match=r"draws random numbers"):
            normalize(captured_from(lambda x, d=draw: d(3, dtype=torch.complex64), randn(2)))


def test_integers_of_any_size_stay_in_their_range() -> None:
    x = torch.zeros(_SIZE)
    low, high = 2**60, 2**60 + 7
    (sample,) = outputs(normalized(lambda x: torch.randint(low, high, x.shape), x), x)
    assert_counts(sample - low, [1 / 7] * 7)


def test_what_is_not_drawn_is_a_positive_zero() -> None:
    x = torch.zeros(_SIZE)
    (sample,) = outputs(normalized(lambda x: torch.bernoulli(x, 0.5), x), x)
    assert float((1 / sample).min()) == 1.0
