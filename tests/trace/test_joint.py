"""The contract with PyTorch's ahead-of-time autograd, and the properties of a joint graph."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._functorch import config as functorch_config
from torch._subclasses import FakeTensorMode

from sp_compiler.base.errors import PassError
from sp_compiler.base.placement import R, S
from sp_compiler.base.provenance import module_path
from sp_compiler.trace import effects
from sp_compiler.trace.joint import JointGraph, trace_joint
from tests.helpers.regions import Mlp, gpt_region, random_inputs, reference, region_of, sp

aten = torch.ops.aten
_APPLY = torch.ops.sp_compiler_function.apply.default


class Outputs(nn.Module):
    """Outputs of every awkward sort: views, an input, an integer, two that share memory."""

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = x * scale
        return y.view(-1), x, ids, y.t(), x.view(2, -1), ids + 1


def _run(joint: JointGraph, *args: Tensor) -> tuple[Tensor | None, ...]:
    return fx.GraphModule({}, joint.graph)(*args)


def test_mlp_joint_graph_computes_outputs_and_gradients() -> None:
    region = region_of(Mlp(4).double(), torch.randn(3, 4, dtype=torch.float64))
    joint = trace_joint(region)
    for node in joint.graph.nodes:  # world_size 1: every conversion is the identity
        if node.target is sp.convert.default:
            node.replace_all_uses_with(node.args[0])
    joint.graph.eliminate_dead_code()
    inputs = random_inputs(region)
    tangent = torch.randn(3, 4, dtype=torch.float64)
    expected = reference(region, inputs)
    grads = torch.autograd.grad(expected, inputs, tangent)
    results = _run(joint, *[x.detach() for x in inputs], tangent)
    torch.testing.assert_close(results, (expected[0].detach(), *grads), rtol=0, atol=1e-13)


def test_signature_names_inputs_after_the_region_and_tangents_after_outputs() -> None:
    region = region_of(Mlp(4), torch.randn(3, 4))
    joint = trace_joint(region)
    names = [node.name for node in joint.placeholders]
    assert names == ["gate_weight", "up_weight", "down_weight", "x", "grad_out0"]
    assert joint.num_inputs == 4
    assert (joint.num_outputs, joint.tangent_outputs) == (1, (0,))
    assert len(joint.grads) == 4


def test_every_node_has_a_value_and_traced_nodes_their_source() -> None:
    region = gpt_region(2, 8, 32, 4, dtype=torch.bfloat16, masks="regenerate")
    joint = trace_joint(region)
    backward = joint.backward_nodes()
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in calls)
    assert all("source" in node.meta for node in calls if node not in backward)
    without = [node for node in calls if node in backward and "source" not in node.meta]
    assert {node.target for node in without} == {aten.add.Tensor}  # sums of gradients
    norm = next(n for n in calls if n.target is aten.native_layer_norm_backward.default)
    assert module_path(norm) == "ln_2"
    assert "F.layer_norm" in norm.meta["stack_trace"]


def test_placements_reach_the_node_that_is_the_value() -> None:
    region = region_of(Mlp(4), torch.randn(3, 4))
    for node in region.module.graph.nodes:
        node.meta["placement"] = R if node.target is sp.convert.default else S(0)
    joint = trace_joint(region)
    placed = {
        node.name: str(node.meta["placement"])
        for node in joint.graph.nodes
        if "placement" in node.meta
    }
    assert placed["convert"] == "R"
    assert placed["mm"] == "S(0)"
    assert "t" not in placed  # the transposed weight is no value of the region


def test_views_inputs_and_integers_may_be_outputs() -> None:
    x, ids, scale = torch.randn(4, 3).double(), torch.arange(3), torch.randn(3).double()
    region = region_of(Outputs(), x, ids, scale, kinds=["call", "input", "param"])
    joint = trace_joint(region)
    assert joint.tangent_outputs == (0, 1, 3, 4)
    inputs = [x.requires_grad_(), ids, scale.requires_grad_()]
    expected = reference(region, inputs)
    used = [expected[index] for index in joint.tangent_outputs]
    tangents = [torch.randn_like(y) for y in used]
    wanted = torch.autograd.grad(used, [x, scale], tangents)
    results = _run(joint, *[value.detach() for value in inputs], *tangents)
    for result, value in zip(results[:6], expected, strict=True):
        torch.testing.assert_close(result, value.detach(), rtol=0, atol=1e-14)
    assert results[7] is None
    torch.testing.assert_close((results[6], results[8]), wanted, rtol=0, atol=1e-13)


def test_output_copies_are_gone() -> None:
    x, ids, scale = torch.randn(4, 3), torch.arange(3), torch.randn(3)
    joint = trace_joint(region_of(Outputs(), x, ids, scale))
    targets = {node.target for node in joint.graph.nodes}
    assert targets.isdisjoint({aten.clone.default, aten.alias.default, aten.detach.default})
    assert joint.outputs[1] is joint.inputs[0]


class Turned(nn.Module):
    """A copy that an operator reads, which it makes contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        return x.t().contiguous().tanh()


def test_a_copy_with_another_layout_stays() -> None:
    joint = trace_joint(region_of(Turned(), torch.randn(4, 3)))
    (copied,) = (node for node in joint.graph.nodes if node.target is aten.clone.default)
    assert copied.meta["val"].stride() == (4, 1)


def test_frozen_inputs_get_no_gradient_and_no_product() -> None:
    module = Mlp(4)
    module.up.weight.requires_grad_(False)
    joint = trace_joint(region_of(module, torch.randn(3, 4), requires_grad=[False]))
    assert [node is None for node in joint.grads] == [False, True, False, True]
    products = [node for node in joint.backward_nodes() if node.target is aten.mm.default]
    assert len(products) == 3  # weight gradients of gate and down, and the gradient between them


def test_nothing_differentiable_yields_the_forward_alone() -> None:
    module = Mlp(4).requires_grad_(False)
    joint = trace_joint(region_of(module, torch.randn(3, 4), requires_grad=[False]))
    assert joint.tangents == []
    assert joint.grads == [None] * 4
    assert joint.tangent_outputs == ()


def test_values_on_the_meta_device_keep_their_backward() -> None:
    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    with FakeTensorMode():
        region = region_of(Attention(), torch.empty(2, 2, 8, 4, device="meta"))
    joint = trace_joint(region)
    targets = [str(node.target) for node in joint.backward_nodes()]
    assert any("attention" in target for target in targets)


def test_a_factorization_raises_by_itself() -> None:
    """Neither operators that raise for singular matrices are left, nor tokens that order them."""

    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (torch.linalg.inv(x),)

    joint = trace_joint(region_of(Inverse(), torch.randn(4, 4)))
    assert [node.name for node in joint.placeholders] == ["x", "grad_out0"]
    (found,) = joint.graph.find_nodes(
        op="call_function", target=torch.ops.aten.linalg_inv_ex.default
    )
    assert found.kwargs == {"check_errors": True}
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        _run(joint, torch.zeros(4, 4), torch.ones(4, 4))


def test_a_functional_region_is_traced_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functionalization would leave the same graph to the letter: it is left out."""
    region = gpt_region(2, 8, 32, 4, dtype=torch.float32, masks="regenerate")
    found = trace_joint(region)
    monkeypatch.setattr(effects, "has_effects", lambda graph: True)
    functionalized = trace_joint(region)
    assert _text(found) == _text(functionalized)


def _text(joint: JointGraph) -> list[str]:
    """Every node with all that is known of it."""
    keys = ("val", "source", "root", "placement", "stack_trace", "nn_module_stack")
    return [
        f"{node.format_node()} {[(key, node.meta.get(key)) for key in keys]}"
        for node in joint.graph.nodes
    ]


@pytest.mark.parametrize(
    ("operator", "known"),
    [(aten.relu.default, True), (sp.convert.default, True), (_APPLY, False)],
)
def test_what_others_wrote_may_have_effects(operator: torch._ops.OpOverload, known: bool) -> None:
    """The function of a user writes in backward what nobody sees without functionalization."""
    graph = fx.Graph()
    graph.call_function(operator, (graph.placeholder("x"),))
    assert effects.has_effects(graph) is not known


class Clamped(nn.Module):
    """The derivative of ``clamp`` writes into a mask that it has just made."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x.clamp(-1.0, 1.0),)


def test_what_a_derivative_writes_is_functional() -> None:
    joint = trace_joint(region_of(Clamped(), torch.randn(4, 3)))
    assert not effects.has_writes(joint.graph)
    assert aten.logical_and.default in {node.target for node in joint.graph.nodes}
    x = torch.tensor([-2.0, 0.5, 3.0]).expand(4, 3)
    _, grad = _run(joint, x, torch.ones(4, 3))
    assert grad is not None
    assert torch.equal(grad, torch.tensor([0.0, 1.0, 0.0]).expand(4, 3))


def test_an_operand_that_is_not_there_is_not_written() -> None:
    """A derivative in C++ passes the mask of attention on, given or not."""

    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    joint = trace_joint(region_of(Attention(), torch.randn(2, 2, 8, 4)))
    (found,) = (node for node in joint.backward_nodes() if "flash" in str(node.target))
    assert "attn_mask" not in found.kwargs


def test_states_of_generators_are_not_made() -> None:
    made = mock.patch.object(PhiloxStateTracker, "reset", side_effect=AssertionError)
    with made:
        trace_joint(region_of(Mlp(4), torch.randn(3, 4)))
        # Where random numbers of a GPU become operators, they are needed.
        with (
            functorch_config.patch(functionalize_rng_ops=True),
            pytest.raises((AssertionError, RuntimeError)),
        ):
            trace_joint(region_of(Mlp(4), torch.randn(3, 4)))


def test_input_without_value_is_refused() -> None:
    region = region_of(Mlp(4), torch.randn(3, 4))
    del region.placeholders[0].meta["val"]
    with pytest.raises(PassError, match=r"\[joint\] a region input needs meta\[\"val\"\]"):
        trace_joint(region)
