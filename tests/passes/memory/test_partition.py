"""The split of a tagged joint graph: what is handed over, in which order things run again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from sp_compiler.base.errors import PassError
from sp_compiler.ir.forward_backward import Partitioned
from sp_compiler.passes.memory.partition import partition
from sp_compiler.trace.joint import JointGraph, trace_joint
from tests.helpers.regions import region_of

aten = torch.ops.aten


class Chain(nn.Module):
    """``exp(tanh(sigmoid(x)).t())``: each backward needs its own result."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid().tanh().t().exp()


def chain(**tags: str) -> JointGraph:
    """The joint graph of :class:`Chain`, nodes tagged by name, "recompute" where not given."""
    joint = trace_joint(region_of(Chain(), torch.randn(3, 2, dtype=torch.float64)))
    backward = joint.backward_nodes()
    for node in joint.graph.nodes:
        if node.op == "call_function" and node not in backward:
            node.meta["recompute"] = tags.pop(node.name, "recompute")
            node.meta["recompute_reason"] = "test"
    assert not tags, f"no such nodes: {tags}"
    return joint


def names(graph: fx.Graph | None) -> list[str]:
    assert graph is not None
    return [node.name for node in graph.nodes if node.op == "call_function"]


def saved_names(parts: Partitioned) -> list[str]:
    return [tensor.name for tensor in parts.saved]


def run(joint: JointGraph, parts: Partitioned, x: Tensor, tangent: Tensor) -> None:
    """Forward then backward of ``parts`` equal the joint graph bitwise."""
    assert parts.backward is not None
    parts.forward.lint()
    parts.backward.lint()
    expected = fx.GraphModule({}, joint.graph)(x, tangent)
    out, *saved = fx.GraphModule({}, parts.forward)(x)
    grads = fx.GraphModule({}, parts.backward)(*saved, tangent)
    assert torch.equal(out, expected[0])
    assert torch.equal(grads[0], expected[1])


CASES = {
    "all kept": (["sigmoid", "tanh", "exp"], {"sigmoid": "save", "tanh": "save", "exp": "save"}),
    "nothing kept": (["x"], {}),
    "middle kept": (["x", "tanh"], {"tanh": "save"}),
    "a kept view keeps its storage": (["x", "tanh"], {"t": "save"}),
    "view and storage, once": (["x", "tanh"], {"t": "save", "tanh": "save"}),
    "what backward does not reach": (
        ["sigmoid", "tanh", "exp"],
        {
            "sigmoid": "save",
            "tanh": "save",
            "exp": "save",
            "t": "save",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tags_decide_what_is_handed_over(case: str) -> None:
    expected, tags = CASES[case]
    joint = chain(**tags)
    parts = partition(joint)
    assert saved_names(parts) == expected
    x = torch.randn(3, 2, dtype=torch.float64)
    run(joint, parts, x, torch.randn(2, 3, dtype=torch.float64))


def test_nodes_run_again_just_before_their_first_use() -> None:
    joint = chain(sigmoid="save")
    parts = partition(joint)
    order = names(parts.backward)
    assert order == ["tanh", "t", "exp", "mul", "t_1", "tanh_backward", "sigmoid_backward"]
    assert parts.backward is not None
    again = [node.name for node in parts.backward.nodes if node.meta.get("recomputed")]
    assert again == ["tanh", "t", "exp"]


def test_forward_keeps_its_order_and_drops_what_nobody_uses() -> None:
    joint = chain(sigmoid="save", tanh="save", exp="save")
    parts = partition(joint)
    assert names(parts.forward) == ["sigmoid", "tanh", "t", "exp"]
    assert parts.num_outputs == 1


def test_joint_graph_is_left_as_it_is() -> None:
    joint = chain(tanh="save")
    before = str(joint.graph)
    partition(joint)
    assert str(joint.graph) == before


def test_kept_bytes_count_each_storage_once() -> None:
    parts = partition(chain(t="save", tanh="save"))
    assert parts.kept_bytes == 2 * 3 * 2 * 8  # x, an activation of another region, and tanh


class Both(nn.Module):
    """Two outputs, a frozen weight, a gradient that is a tangent and one that needs no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.weight, y + 1


def test_linear_regions_hand_over_the_weight_alone() -> None:
    args = torch.randn(3, 2).double(), torch.randn(3).double()
    joint = trace_joint(region_of(Both(), *args))
    for node in joint.graph.nodes:
        node.meta.setdefault("recompute", "save")
    parts = partition(joint)
    assert saved_names(parts) == ["weight"]
    assert parts.kept_bytes == 0
    assert parts.backward is not None
    tangents = torch.ones(3, 2).double(), torch.ones(3).double()
    weight = torch.randn(2).double()
    grads = fx.GraphModule({}, parts.backward)(weight, *tangents)
    assert grads[0] is None
    assert torch.equal(grads[1], weight.expand(3, 2))
    assert grads[2] is tangents[1]


def test_region_without_gradients_has_no_backward() -> None:
    joint = trace_joint(region_of(Chain(), torch.randn(3, 2), requires_grad=[False]))
    for node in joint.graph.nodes:
        node.meta["recompute"] = "save"
    parts = partition(joint)
    assert parts.backward is None
    assert parts.saved == ()


def test_untagged_node_is_refused() -> None:
    joint = chain()
    del next(node for node in joint.graph.nodes if node.name == "tanh").meta["recompute"]
    with pytest.raises(PassError, match=r"\[partition\] a forward node needs meta"):
        partition(joint)
