"""One node of a graph as plain data."""

from __future__ import annotations

from torch.fx import Node

from sp_compiler.base.provenance import module_path, source_line
from sp_compiler.cost.node_cost import tensor_bytes
from sp_compiler.graph_diff.data import NodeInfo
from sp_compiler.ir.op_traits import collective_of, is_collective
from sp_compiler.ir.text import meta_text, render_node, render_target


def node_info(node: Node) -> NodeInfo:
    """Describe ``node``, whose metadata may be missing."""
    return NodeInfo(
        name=node.name,
        op=render_target(node),
        text=render_node(node),
        users=tuple(user.name for user in node.users),
        collective=collective_text(node),
        value=meta_text(node, "val"),
        num_bytes=_num_bytes(node),
        placement=meta_text(node, "placement"),
        tag=meta_text(node, "recompute"),
        module=module_path(node),
        line=source_line(node),
    )


def collective_text(node: Node) -> str:
    """Return the kind of communication of ``node``, "" if it has none."""
    if not is_collective(node):
        return ""
    # Our operators declare their kind; torch's functional collectives are named after it.
    return collective_of(node) or render_target(node).rpartition(".")[2]


def _num_bytes(node: Node) -> int | None:
    num_bytes = tensor_bytes(node.meta.get("val"))
    # A dynamic size makes this a symbol, which cannot be added up or written as JSON.
    return num_bytes if isinstance(num_bytes, int) else None
