"""Comparisons of open sizes that a rule depends on."""

from __future__ import annotations

from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sp_compiler.rules.factors import record_cuts


def test_whether_one_cut_divides_another_is_recorded() -> None:
    """The rule of a reshape into pairs is that of the example only for even sizes."""
    env = ShapeEnv()
    symbol = env.create_symbol(12, ConstantSource("size"), dynamic_dim=DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=12)
    record_cuts((size,), (size // 2, 2))
    (even,) = {str(guard.expr) for guard in env.guards if "Mod" in str(guard.expr)}
    assert even == f"Eq(Mod({symbol}, 2), 0)"
