"""Parts of a joint graph that are not functional: writes, constants, checks of factorizations."""

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
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.provenance import node_origin
from sp_compiler.ir.program import Region
from sp_compiler.ir.rewriting import make_like

_TOKEN_INPUTS = (ForwardTokenAOTInput, BackwardTokenAOTInput)
_TOKEN_OUTPUTS = (ForwardTokenAOTOutput, BackwardTokenAOTOutput)
_CHECK_ERRORS = torch.ops.aten._linalg_check_errors.default

# Namespaces of operators whose kernels and derivatives are known. Only functionalization can tell
# what a user's operator or autograd function writes, and the order of its effects.
_KNOWN = ("aten", "sp_compiler")


def has_effects(graph: fx.Graph) -> bool:
    """Return whether an operator in a region, or in its derivative, may have a side effect."""
    return any(
        isinstance(node.target, torch._ops.OperatorBase)
        and getattr(node.target, "namespace", None) not in _KNOWN
        for node in graph.nodes
    )


def has_writes(traced: fx.Graph) -> bool:
    """Return whether a graph that was traced without functionalization needs it.

    Some derivatives, such as that of ``clamp``, write into a tensor that they have just made.
    Factorizations have a check without a result, which is kept only as an effect.
    """
    schemas = [getattr(node.target, "_schema", None) for node in traced.nodes]
    return any(
        schema.is_mutable or any(each.name == "check_errors" for each in schema.arguments)
        for schema in schemas
        if schema is not None
    )


def drop_defaults(traced: fx.Graph) -> None:
    """Drop keyword arguments that are ``None`` if that is their default.

    Functionalization drops them. Without it they stay where a derivative in C++ passes an undefined
    tensor.
    """
    for node in traced.nodes:
        for argument in getattr(getattr(node.target, "_schema", None), "arguments", ()):
            is_none = argument.name in node.kwargs and node.kwargs[argument.name] is None
            if is_none and argument.has_default_value() and argument.default_value is None:
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != argument.name}


def copied_constant(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """Make the constant that a user's autograd function makes with ``torch.tensor(number)``."""
    (value,) = (user.meta["val"] for user in list(node.users)[:1])
    tensor = getattr(node.graph.owning_module, str(node.target))
    number = tensor.flatten()[:1].tolist()
    if not number or not bool((tensor == number[0]).all()):
        raise UnsupportedError(
            "a torch.autograd.Function makes a tensor of several numbers (torch.tensor([...])); "
            f"make it outside and pass it to apply()\n{node_origin(node)}"
        )
    args, options = (list(tensor.shape), number[0]), {"dtype": tensor.dtype, "device": value.device}
    return make_like(
        graph, torch.ops.aten.full.default, args, options, like=node, origin=Pass.JOINT, val=value
    )


def let_factorizations_raise(traced: fx.Graph, region: Region) -> None:
    """Make factorizations raise for singular matrices if they do so in the model.

    Up to PyTorch 2.12 the trace loses their check, which is an operator without a result. A model
    that requests the error code (``*_ex``) reads it itself.
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
                    f"{effect} is registered as having ordered effects; a compiled model runs only "
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
    # Tokens are also outputs, and no node computes them any more.
    output = traced.output_node()
    returned = zip(output.args[0], output.meta["desc"], strict=True)
    kept = [(value, desc) for value, desc in returned if not isinstance(desc, _TOKEN_OUTPUTS)]
    output.args = ([value for value, _ in kept],)
    output.meta["desc"] = [desc for _, desc in kept]
    for node in traced.find_nodes(op="placeholder"):
        if isinstance(node.meta["desc"], _TOKEN_INPUTS):
            traced.erase_node(node)
