"""Tensors that require a gradient and are neither parameters nor inputs of the model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from sp_compiler.base.errors import UnsupportedError

_WITHOUT_GRADIENT = re.compile(r"aten::(detach|new_\w+|\w+_like)")


def refuse_trained_constants(
    exported: ExportedProgram, lines: Mapping[StorageWeakRef, str], buffers: Collection[str]
) -> None:
    """Refuse a constant or a buffer that gets a gradient in the model but would get none here.

    Args:
        exported: a functional export, with values computed under ``no_grad`` detached.
        lines: the lines that compute with tensors that require a gradient, by storage of the
            tensor.
        buffers: names of the buffers that require a gradient.

    Raises:
        UnsupportedError: an output depends differentiably on one.
    """
    inputs = exported.graph.find_nodes(op="placeholder")
    for node, spec in zip(inputs, exported.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.BUFFER and spec.target in buffers and _reaches_output(node):
            raise UnsupportedError(
                f"buffer {spec.target!r} requires a gradient, but a step computes only those of "
                "parameters and inputs: make it an nn.Parameter, or read it with detach()"
            )
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            continue
        value = exported.constants[spec.target]
        line = lines.get(StorageWeakRef(value.untyped_storage()))
        if line is not None and _reaches_output(node):
            raise UnsupportedError(
                f"the forward computes with a tensor {tuple(value.shape)} that requires a gradient "
                f"and is not read as a parameter of a module, so it would get none: {line}; make "
                "it an nn.Parameter that is an attribute of a module (several: an "
                "nn.ParameterList) and read it there, or an argument of forward, or read it with "
                "detach()"
            )


def _reaches_output(constant: Node) -> bool:
    """Return whether a gradient flows from an output to ``constant``."""
    todo, seen = [constant], {constant}
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                return True
            if user not in seen and not _ends_gradients(user):
                seen.add(user)
                todo.append(user)
    return False


def _ends_gradients(node: Node) -> bool:
    if isinstance(node.target, OpOverload) and _WITHOUT_GRADIENT.fullmatch(
        node.target._schema.name
    ):
        return True
    dtype = getattr(node.meta.get("val"), "dtype", None)
    return dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
