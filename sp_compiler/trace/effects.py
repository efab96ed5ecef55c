"""Operators in a joint graph that have side effects: checks of matrix factorizations."""

from __future__ import annotations

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BackwardTokenAOTInput,
    BackwardTokenAOTOutput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
)

from sp_compiler.base.errors import UnsupportedError
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.program import Region

_TOKEN_INPUTS = (ForwardTokenAOTInput, BackwardTokenAOTInput)
_TOKEN_OUTPUTS = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)
_CHECK_ERRORS = torch.ops.aten._linalg_check_errors.default


def let_factorizations_raise(traced: fx.Graph, region: Region) -> None:
    """Make factorizations raise for singular matrices if they do so in the model.

    Up to PyTorch 2.12 the trace loses their check, which is an operator without a result. A model
    that asks for an error code reads the code itself.
    """
    asked = {node.target for node in region.module.graph.nodes}
    for node in traced.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        if "check_errors" in names and node.target not in asked:
            node.update_kwarg("check_errors", True)


def drop_effects(traced: fx.Graph) -> None:
    """Move the check of a factorization into it, and drop the tokens that keep checks in order.

    PyTorch 2.13 keeps the check, which has no result, in the graph by means of tokens: extra inputs
    and outputs, in forward and in backward.
    """
    for node in list(traced.nodes):
        if node.target is torch.ops.higher_order.with_effects:
            token, effect, *args = node.args
            if effect is not _CHECK_ERRORS:
                raise UnsupportedError(
                    f"{effect} is registered as having effects, in an order; a compiled model runs "
                    "what its outputs need: call it outside of the compiled model\n"
                    f"{node_origin(node)}"
                )
            for part in list(node.users):
                part.replace_all_uses_with(token)
                traced.erase_node(part)
        elif node.target is _CHECK_ERRORS:
            args = node.args
        else:
            continue
        # Its argument is the error code, one of the results of the factorization.
        factorization = args[0].args[0]
        factorization.update_kwarg("check_errors", True)
        traced.erase_node(node)
    # Tokens come back as outputs, and nothing makes them any more.
    output = traced.output_node()
    returned = zip(output.args[0], output.meta["desc"], strict=True)
    kept = [(value, desc) for value, desc in returned if not isinstance(desc, _TOKEN_OUTPUTS)]
    output.args = ([value for value, _ in kept],)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in traced.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], _TOKEN_INPUTS):
            traced.erase_node(node)
