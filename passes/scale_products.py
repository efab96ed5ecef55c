"""Move a constant factor of a matmul to the smallest of its operands and results.

::

    scores = bmm(q, k) * 0.125              -->  scores = bmm(q * 0.125, k)

    grad_scores = grad * 0.125                   grad_q = bmm(grad, k^T) * 0.125
    grad_q = bmm(grad_scores, k^T)          -->  grad_k = bmm(q^T, grad) * 0.125
    grad_k = bmm(q^T, grad_scores)

Scores of attention are larger than queries and keys if there are more keys than a head has
features, and logits are larger than hidden states: the multiplication reads and writes less, and
there is no second tensor of their size. Views may come between. A power of two gives bitwise the
same result. Any other factor rounds each element of the smaller tensor one more time and each
result one time less: a difference like that of another order of summation.

Runs after differentiation, so that backward reads the same values as without it: a scaled query
would be saved in addition to the projection that the query is a part of. Runs after chunking,
because each chunk scales its own rows.

Mutates the graph. Reads ``meta["val"]``.
"""

from __future__ import annotations

import math
from collections.abc import Container

import torch
from torch.fx import Node

from sp_compiler.base.pass_report import Pass, report_of
from sp_compiler.ir.fx import reach, tensor_operands
from sp_compiler.ir.op_traits import base, collective_of, is_pure_view
from sp_compiler.ir.rewriting import make_call
from sp_compiler.ir.symbolic import example_numel, same_shape
from sp_compiler.trace.joint import JointGraph

_aten = torch.ops.aten
_TIMES = (_aten.mul.Tensor, _aten.mul.Scalar)
_OVER = (_aten.div.Tensor, _aten.div.Scalar)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
# Least elements of a result: below, launching one more operator costs more than the memory saved.
# On one core a model with hidden size 64 was 2 % slower when its 32,768 scores were scaled this
# way, and one with hidden size 256 and 2 million scores 5 % faster.
LEAST_ELEMENTS = 1 << 18
# Both factors are tensors, and nothing is added to the result.
_PRODUCTS = (_aten.mm.default, _aten.bmm.default, _aten.linear.default)


def scale_products(joint: JointGraph) -> JointGraph | tuple[()]:
    """Move factors to the first operand of a matmul or to its results, if those are smaller.

    Only factors of magnitude at most 1 are moved: a larger one could overflow in 16 bits. Weights
    are never scaled, because policies recognise a linear by its weight.

    Returns:
        ``joint``, or ``()`` if there is no such factor: the pass then makes no stage.
    """
    kinds = zip(joint.inputs, joint.input_kinds, strict=True)
    weights = {node for node, kind in kinds if kind != "call"}
    for node in list(joint.graph.nodes):
        if _shrinks(node) and not _scale_factor(node, weights):
            _scale_results(node)
    joint.graph.lint()
    return joint if report_of(Pass.SCALE_PRODUCTS).rewrites else ()


def _shrinks(node: Node) -> bool:
    """Return whether ``node`` multiplies a tensor by a number of at most 1, or divides it by one of
    at least 1."""
    if node.op != "call_function" or node.target not in (*_TIMES, *_OVER) or node.kwargs:
        return False
    source, number = node.args
    if not isinstance(source, Node) or not isinstance(number, (int, float)):
        return False
    # Not 0: 0 * inf is NaN, and moving it across a matmul would change which elements are NaN.
    size = abs(number)
    is_small = 0 < size <= 1 if node.target in _TIMES else 1 <= size < math.inf
    value, given = node.meta["val"], source.meta["val"]
    # Not float16, whose small exponent range the smaller tensor, scaled down, may leave: elements
    # become subnormal and lose digits. Loss scaling puts gradients just below its largest value.
    is_floating = value.dtype in _DTYPES and value.dtype == given.dtype
    return is_small and is_floating and _size(node) >= LEAST_ELEMENTS


def _scale_factor(node: Node, weights: Container[Node]) -> bool:
    """``view(product(a, b)) * number`` -> ``view(product(a * number, b))``; return whether."""
    source = product = node.args[0]
    while is_pure_view(product) and len(product.users) == 1:
        product = product.args[0]
    if not _is_product(product) or len(product.users) > 1 or not _same_strides(source, node):
        return False
    # If only a slice is scaled, the move would keep the entire result of the matmul alive.
    factor, size = product.args[0], _size(product)
    if _size(node) != size or _size(factor) >= size:
        return False
    # async_tp needs a gather next to the matmul that reads it.
    if base(factor) in weights or collective_of(base(factor)) is not None:
        return False
    with node.graph.inserting_before(product):
        scaled = _scaled(node, factor, name="scaled")
    # By position: the other factor may be the same tensor.
    product.update_arg(0, scaled)
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    report_of(Pass.SCALE_PRODUCTS).rewrote(kind="scale_factor")
    return True


def _scale_results(node: Node) -> None:
    """``product(view(x * number), b)`` -> ``product(view(x), b) * number``, if only such matmuls
    read ``x * number``."""
    source = node.args[0]
    # An input of the region may have other strides than in the trace.
    if source.op == "placeholder" or is_pure_view(source) or not _same_strides(source, node):
        return
    reached = list(reach([node], lambda each: each.users if _carries(each, node) else ()))
    products = [each for each in reached if not _carries(each, node)]
    # A matmul of the tensor with itself would be scaled twice.
    num_uses = sum(x in reached for each in products for x in tensor_operands(each))
    if not products or not all(map(_is_product, products)) or len(products) != num_uses:
        return
    if sum(map(_size, products)) >= _size(node):
        return
    if any(map(_is_reduced, products)):
        return
    for product in products:
        with node.graph.inserting_after(product):
            scaled = _scaled(node, product, name=product.name)
        product.replace_all_uses_with(
            scaled, delete_user_cb=lambda user, new=scaled: user is not new
        )
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)
    report_of(Pass.SCALE_PRODUCTS).rewrote(kind="scale_results")


def _same_strides(source: Node, node: Node) -> bool:
    """Return whether both have the same strides: a view of ``node`` may need them."""
    return same_shape(source.meta["val"].stride(), node.meta["val"].stride())


def _carries(each: Node, node: Node) -> bool:
    """Return whether ``each`` is ``node``, or a view."""
    return each is node or is_pure_view(each)


def _is_reduced(product: Node) -> bool:
    """Return whether a collective reads the result: async_tp needs the two next to each other."""
    readers = reach([product], lambda each: each.users if _carries(each, product) else ())
    return any(collective_of(reader) is not None for reader in readers)


def _is_product(node: Node) -> bool:
    return node.target in _PRODUCTS and len(node.args) == 2  # no bias, which would be scaled too


def _scaled(node: Node, x: Node, name: str) -> Node:
    """Add a call that scales ``x`` as ``node`` does its operand."""
    # In a chunk it is recomputed in backward, like everything in the chunk.
    about = {"chunk": node.meta["chunk"]} if "chunk" in node.meta else {}
    if "placement" in x.meta:
        about["placement"] = x.meta["placement"]
    args = x, node.args[1]
    return make_call(
        node.graph, node.target, args, like=node, origin=Pass.SCALE_PRODUCTS, name=name, meta=about
    )


def _size(node: Node) -> int:
    return example_numel(node.meta["val"])
