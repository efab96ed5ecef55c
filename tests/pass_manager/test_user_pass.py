"""Passes of a user's own: right ones run, wrong ones are refused or found, by their names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import sp_compiler
from sp_compiler.base.errors import ArgumentError, PassError
from sp_compiler.base.pass_report import PassReport
from sp_compiler.compiler import build, to_program
from sp_compiler.ir.snapshot import Snapshot
from sp_compiler.options import CompileOptions
from sp_compiler.trace.export import capture, flatten_inputs
from sp_compiler.verification.reference import run_program
from sp_compiler.verification.simulate import simulate_step

aten = torch.ops.aten
_SEED = torch.tensor(0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _model() -> nn.Module:
    return _Model().double()


_X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _gelus(module: GraphModule) -> list[Node]:
    return module.graph.find_nodes(op="call_function", target=aten.gelu.default)


def gelu_by_erf(module: GraphModule) -> int:
    """``gelu(x)`` -> ``x / 2 * (1 + erf(x / sqrt(2)))``, without a word about shapes."""
    graph, found = module.graph, _gelus(module)
    for node in found:
        (x,) = node.args
        with graph.inserting_before(node):
            half = graph.call_function(aten.mul.Tensor, (x, 0.5))
            scaled = graph.call_function(aten.mul.Tensor, (x, 1 / math.sqrt(2)))
            raised = graph.call_function(
                aten.add.Tensor, (_call(graph, aten.erf.default, scaled), 1)
            )
            node.replace_all_uses_with(graph.call_function(aten.mul.Tensor, (half, raised)))
        graph.erase_node(node)
    return len(found)


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    return graph.call_function(target, args)


def _gradients(program: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Of one step of a program on simulated ranks."""
    params = dict(_model().named_parameters())
    step = simulate_step(program, params, {}, [_X], _SEED)
    return step.outputs[0], {name: g for name, g in step.grads.items() if g is not None}


def _compiled(*passes: Any, tp: int = 2) -> Any:
    return build(_model(), (_X,), {}, CompileOptions(tp=tp, passes=passes))


def _ops(stage: Snapshot) -> list[str]:
    return [str(n.target) for graph in stage.graphs.values() for n in graph.nodes]


def test_a_right_pass_changes_the_graph_and_no_number() -> None:
    program = _compiled(gelu_by_erf)
    loss, grads = _gradients(program)
    model = _model()
    true = model(_X)
    true.backward()
    assert torch.allclose(loss, true, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-14)
    assert list(program.stages)[:4] == ["export", "normalize", "gelu_by_erf", "outline"]
    assert "aten.gelu.default" in _ops(program.stages["normalize"])
    assert "aten.gelu.default" not in _ops(program.stages["gelu_by_erf"])
    assert "gelu" not in program.code
    assert "erf(" in program.code
    (report,) = [report for report in program.reports if report.name == "gelu_by_erf"]
    assert report.rewrites == 2
    assert report.node_delta == 2 * 4


def test_layers_that_are_rewritten_alike_stay_one_block() -> None:
    program = _compiled(gelu_by_erf).program
    assert [call.path for call in program.calls] == ["", "blocks.0", "blocks.1", ""]
    assert program.calls[1].region is program.calls[2].region


def test_new_nodes_say_where_they_come_from() -> None:
    graph = _compiled(gelu_by_erf).stages["gelu_by_erf"].graphs["model"]
    made = [node for node in graph.nodes if node.meta.get("origin") == "gelu_by_erf"]
    assert len(made) == 2 * 5
    for node in made:
        assert list(node.meta["nn_module_stack"].values())[1][0].startswith("blocks.")
        assert node.meta["val"].shape == (4, 6, 16)
        assert node.meta["requires_grad"]


def test_what_a_pass_writes_is_normalized() -> None:
    """A view with a guessed size, a dim from the front, a fused bias: no other pass knows them."""

    def unusual(module: GraphModule) -> None:
        for node in _gelus(module):
            graph = module.graph
            with graph.inserting_after(node):
                flat = _call(graph, aten.view.default, node, [-1, 16])
            with graph.inserting_after(flat):
                back = _call(graph, aten.view.default, flat, [4, 6, 16])
            node.replace_all_uses_with(back)
            flat.replace_input_with(back, node)

    plain, rewritten = _compiled(), _compiled(unusual)
    assert rewritten.code == plain.code


@pytest.mark.parametrize("result", [None, 3, PassReport("anything", rewrites=3)])
def test_results_of_a_pass(result: Any) -> None:
    def reports(module: GraphModule) -> Any:
        return result

    (report,) = [r for r in _compiled(reports).reports if r.name == "reports"]
    assert report.rewrites == (0 if result is None else 3)


class AsObject:
    def __call__(self, module: GraphModule) -> None:
        """Change nothing."""


def test_a_callable_object_is_called_as_its_class() -> None:
    assert "AsObject" in _compiled(AsObject()).stages


def _stale_shape(module: GraphModule) -> None:
    """The result has another shape, and nobody said so to what uses it."""
    for node in _gelus(module):
        with module.graph.inserting_after(node):
            cut = _call(module.graph, aten.slice.Tensor, node, 0, 0, 2)
        node.replace_all_uses_with(cut)
        cut.replace_input_with(cut, node)


def _wrong_val(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.meta["val"] = node.meta["val"].new_empty(3, 5)


def _wrong_dtype(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.meta["val"] = node.meta["val"].float()


def _wrong_requires_grad(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.meta["requires_grad"] = False


def _detaches(module: GraphModule) -> None:
    loss = module.graph.output_node().args[0][0]
    with module.graph.inserting_after(loss):
        detached = _call(module.graph, aten.detach.default, loss)
    module.graph.output_node().args = ((detached,),)


def _unused_input_erased(module: GraphModule) -> None:
    for node in _gelus(module):
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    module.graph.placeholder("extra")


def _other_outputs(module: GraphModule) -> None:
    output = module.graph.output_node()
    output.args = ((output.args[0][0], output.args[0][0]),)


def _output_of_another_shape(module: GraphModule) -> None:
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        row = _call(module.graph, aten.unsqueeze.default, output.args[0][0], 0)
    output.args = ((row,),)


def _python_function(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.target = torch.nn.functional.gelu


def _in_place(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.target = aten.relu_.default


def _random(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.target = aten.rand_like.default


def _wrong_operands(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    node.target, node.args = aten.mm.default, (node.args[0], node.args[0])


def _size_as_a_node(module: GraphModule) -> None:
    (node, *_) = _gelus(module)
    with module.graph.inserting_before(node):
        size = _call(module.graph, aten.sym_size.int, node.args[0], 1)
    node.target, node.args = aten.mul.Tensor, (node.args[0], size)


def _use_before_definition(module: GraphModule) -> None:
    first, second = _gelus(module)
    first.args = (second,)


def _raises(module: GraphModule) -> None:
    raise ValueError("nothing to do")


def _returns_the_graph(module: GraphModule) -> Any:
    return module


_BROKEN: dict[Callable[[GraphModule], Any], str] = {
    _stale_shape: r'meta\["val"\] is float64\[4, 6, .*expected float64\[2, 6, ',
    _wrong_val: r'meta\["val"\] is float64\[3, 5\] on cpu; expected float64\[4, 6, 16\]',
    _wrong_dtype: r'meta\["val"\] is float32',
    _wrong_requires_grad: r'meta\["requires_grad"\] is False; autograd says otherwise',
    _detaches: r"output 0 of the graph .* no gradient",
    _unused_input_erased: "changed the inputs",
    _other_outputs: "returns 2 values; expected 1",
    _output_of_another_shape: r"output 0 of the graph is float64\[1\]",
    _python_function: "a call of gelu; expected an operator such as",
    _in_place: "relu_.default writes to its inputs",
    _random: "draws random numbers",
    _wrong_operands: "does not take these operands",
    _size_as_a_node: r'sym_size.int returns int; .* a size is meta\["val"\].shape\[dim\]',
    _use_before_definition: "raised RuntimeError",
    _raises: "raised ValueError: nothing to do",
    _returns_the_graph: "returned GraphModule; expected PassReport, int or None",
}


@pytest.mark.parametrize("broken", _BROKEN, ids=lambda each: each.__name__)
def test_a_broken_pass_is_refused_by_name(broken: Any) -> None:
    with pytest.raises(PassError, match=_BROKEN[broken]) as error:
        _compiled(broken)
    assert error.value.pass_name == broken.__name__
    assert f"[{broken.__name__}]" in str(error.value)


def test_a_pass_that_broke_a_node_names_it_and_its_line() -> None:
    with pytest.raises(PassError) as error:
        _compiled(_wrong_val)
    assert error.value.node is not None
    assert "blocks.0" in str(error.value)
    assert "gelu" in str(error.value)


def _halves(module: GraphModule) -> None:
    """Of the right form, and wrong."""
    for node in _gelus(module):
        node.target, node.args = aten.mul.Tensor, (node.args[0], 0.5)


def test_wrong_numbers_are_found_by_name() -> None:
    model = _Model()
    report = sp_compiler.verify(model, ((_X.float(),), {}), tp=2, passes=[gelu_by_erf, _halves])
    assert not report.ok or report.first_bad_pass is None
    report = sp_compiler.verify(model, ((_X.float(),), {}), tp=2, passes=[_halves])
    assert report.first_bad_pass == "_halves"
    report = sp_compiler.verify(model, ((_X.float(),), {}), tp=2, passes=[gelu_by_erf])
    assert report.ok, str(report)
    assert "gelu_by_erf" in [row.stage for row in report.table]


def test_a_refused_pass_is_the_first_bad_one() -> None:
    report = sp_compiler.verify(_Model(), ((_X.float(),), {}), tp=2, passes=[_wrong_val])
    assert report.first_bad_pass == "_wrong_val"
    assert [row.stage for row in report.table] == ["export", "normalize", "_wrong_val"]


def test_plan_shows_what_a_pass_did() -> None:
    plan = sp_compiler.plan(_model(), ((_X,), {}), tp=2, passes=[gelu_by_erf])
    assert [report.name for report in plan.passes][2] == "gelu_by_erf"
    assert plan.to_dict()["passes"][2]["rewrites"] == 2
    assert plan.options["passes"] == ["gelu_by_erf"]
    assert "gelu_by_erf" in str(plan)


def test_open_sizes_and_a_program_on_one_device() -> None:
    options = CompileOptions(passes=[gelu_by_erf])
    program = to_program(capture(_model(), (_X,), open_dims=True), options)
    assert program.sizes is not None
    y = torch.cat([_X, _X])
    inputs, _ = flatten_inputs((y,))
    loss = run_program(program, dict(_model().named_parameters()), {}, inputs).outputs[0]
    torch.testing.assert_close(loss, _model()(y))
    options = CompileOptions(passes=[_size_as_a_node])
    with pytest.raises(PassError, match=r"sym_size\.int returns SymInt"):
        to_program(capture(_model(), (_X,), open_dims=True), options)


def test_passes_that_are_none() -> None:
    with pytest.raises(ArgumentError, match="expected a list of functions"):
        CompileOptions(passes=[3])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="'gelu_by_erf' is another one's"):
        CompileOptions(passes=[gelu_by_erf, gelu_by_erf])

    def shard(module: GraphModule) -> None: ...

    with pytest.raises(ArgumentError, match="'shard' is the compiler's own"):
        CompileOptions(passes=[shard])


def test_ranks_compare_their_passes() -> None:
    own, theirs = CompileOptions(passes=[gelu_by_erf]), CompileOptions()
    assert own.texts()["passes"] != theirs.texts()["passes"]
