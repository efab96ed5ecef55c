"""Generated code that a user edits and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

import sp_compiler
from sp_compiler import ArgumentError, RankMismatchError, UnsupportedError
from sp_compiler.codegen.edited import with_code
from sp_compiler.compiler import build
from sp_compiler.ir.compiled_program import CompiledProgram
from sp_compiler.options import CompileOptions
from sp_compiler.verification.edited import check_edited
from tests.helpers.calls_in_a_row import INPUTS, SLOW, compiled
from tests.helpers.ranks import run_on_ranks
from tests.helpers.users import batch, net

_INPUTS: Any = ((batch(2, 4),), {})
# So small a model would be replicated.
_HINTS: Any = {"blocks.*.up": Shard(0)}


@pytest.fixture(scope="module")
def module() -> Any:
    return sp_compiler.compile(net(), tp=1, example_inputs=_INPUTS)


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    """For two ranks."""
    return build(net(), _INPUTS[0], {}, CompileOptions.of(2, {"hints": _HINTS}))


def _edited(text: str, *edits: tuple[str, str]) -> str:
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return text


def _gradients(module: Any) -> list[Any]:
    module.zero_grad()
    module(*_INPUTS[0])["loss"].backward()
    return [parameter.grad for parameter in module.parameters()]


def test_an_edit_that_computes_the_same_runs(tmp_path: Path) -> None:
    module: Any = sp_compiler.compile(net(), tp=1, example_inputs=_INPUTS)
    expected = _gradients(module)
    # It says that it ran, and saves one tensor more, which its backward unpacks.
    text = _edited(
        module.code,
        ("# norm\n", "tp.ran = True\n"),
        ("x, up)\n        return (add", "x, up, x)\n        return (add"),
        ("x, up) = saved", "x, up, _) = saved"),
    )
    (tmp_path / "code.py").write_text(text, encoding="utf-8")
    module.load_code(tmp_path / "code.py", _INPUTS)
    assert module.code == text
    communicator = module._sp_state.group.communicator
    assert not hasattr(communicator, "ran"), "it was checked beside the module's own group"
    for grad, true in zip(_gradients(module), expected, strict=True):
        assert torch.equal(grad, true)
    assert communicator.ran


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("class Block:", "class Block"), r"edited code, line \d+: .*: class Block$"),
        (("class Block:", "class Other:"), "there is no class Block; keep all classes"),
        (("class Block:", "1 / 0\nclass Block:"), r"ZeroDivision.*\nin line \d+ of .*: 1 / 0$"),
        (("def backward(tp", "def back(tp"), r"Block\.backward is missing; .*\(tp, saved, grad_"),
        (("up_bias, down_weight, down_bias, x):", "x):"), r"forward takes .*; expected a static"),
        (("x, up) = saved", "x) = saved"), r"ValueError: .*unpack.*\nin line \d+ of .* = saved$"),
        (("F.gelu(up)", "F.glu_(up)"), r"AttributeError: .*\nin line \d+ of .*F\.glu_\(up\)"),
        (("F.gelu(up)", "F.relu(up)"), "computes another result: .* differs by"),
        (("x + F.linear", "x - F.linear"), "computes another result: .* differs by"),
        (
            ("grad_down_bias = torch.sum(", "grad_down_bias = 1.001 * torch.sum("),
            r"another result: gradient of blocks\.0\.down\.bias.* differs by 1\.0e-03",
        ),
    ],
)
def test_a_wrong_edit_is_refused(module: Any, edit: tuple[str, str], message: str) -> None:
    before, latest = module.code, module._sp_state.latest
    with pytest.raises(ArgumentError, match=message):
        module.load_code(_edited(before, edit), _INPUTS)
    assert module.code == before
    assert module._sp_state.latest is latest


@pytest.mark.parametrize("function", ["backward", "backward_ahead", "backward_rest"])
def test_an_edit_of_a_function_that_few_steps_run_is_refused(function: str) -> None:
    """Where layers recompute ahead, an ordinary step runs ``backward_ahead``, and ``backward_rest``
    for the first layer; under hooks or FSDP2 it is ``backward``."""
    with sp_compiler.emulated_group(2, hardware=SLOW):
        module = compiled(recompute="full")
        text = module.code
        start = text.index(f"def {function}(tp", text.index("class Block"))
        gradient = text.index("grad_", text.index("return (", start))
        with pytest.raises(ArgumentError, match="computes another result"):
            module.load_code(f"{text[:gradient]}3 * {text[gradient:]}", ((), INPUTS))


def test_nan_proves_nothing(module: Any) -> None:
    with pytest.raises(ArgumentError, match="example_inputs: the generated code computes NaN"):
        module.load_code(module.code, ((batch(2, 4) * torch.nan,), {}))


def test_no_such_file(module: Any) -> None:
    with pytest.raises(ArgumentError, match=r"expected the text of module\.code.*edited\.py"):
        module.load_code("edited.py", _INPUTS)


def test_kernels_of_inductor_have_no_text_to_edit() -> None:
    module: Any = sp_compiler.compile(net(), tp=1, backend="inductor")
    with pytest.raises(UnsupportedError, match="load_code: backend='inductor'"):
        module.load_code("\n", _INPUTS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("", ""), ""),
        (("tp.reduce_scatter(", "2 * tp.reduce_scatter("), "computes another result"),
        (
            ("tp.shard(", "tp.unknown("),
            r"fails: AttributeError: .*unknown.*\nin line \d+ of .*unknown\(",
        ),
    ],
)
def test_collectives_of_two_ranks(
    program: CompiledProgram, edit: tuple[str, str], message: str
) -> None:
    model = net()
    edited = with_code(program, _edited(program.code, edit))
    arguments: Any = (program, edited, dict(model.named_parameters()), {}, list(_INPUTS[0]))
    if not message:
        check_edited(*arguments)
    else:
        with pytest.raises(ArgumentError, match=message):
            check_edited(*arguments)


def _on_a_rank() -> bool:
    module: Any = sp_compiler.compile(net(), tp=2, example_inputs=_INPUTS, hints=_HINTS)
    expected = _gradients(module)
    text = _edited(module.code, ("# norm\n", "tp.ran = True\n"))
    with pytest.raises(RankMismatchError, match="digest of the edited code differs"):
        module.load_code(text if dist.get_rank() else module.code, _INPUTS)
    module.load_code(text, _INPUTS)
    pairs = zip(_gradients(module), expected, strict=True)
    same = all(torch.equal(grad.to_local(), true.to_local()) for grad, true in pairs)
    return same and module._sp_state.group.communicator.ran


@pytest.mark.slow
def test_two_ranks_load_the_same_text() -> None:
    assert run_on_ranks(2, _on_a_rank) == [True, True]
