"""Second check of the forward of a sharded region, by the type checker of ``spmd_types``.

The region runs node by node on meta tensors in the checker's global mode, in which the type of a
shard includes its dim. It needs a mesh axis but no process group. Unlike
:mod:`sp_compiler.check.partitioned`, it distinguishes R from I: a missing I -> R conversion is
found here, at the operator that mixes them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import spmd_types as spmd
import torch
from spmd_types._checker import _shard_propagator
from spmd_types._mesh_axis import MeshAxis, _make_axis_layout
from spmd_types.checker import typecheck
from spmd_types.types import DTensorPropagationError
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node

from sp_compiler.base.errors import PlacementError
from sp_compiler.base.pass_report import Pass
from sp_compiler.base.placement import I, P, Placement, R, S, as_value
from sp_compiler.check.derive import Results, declared_strategies, derive
from sp_compiler.check.report import CheckReport
from sp_compiler.check.shapes import global_shape
from sp_compiler.check.torch_functions import (
    UNKNOWN_LINEAR,
    call,
    is_rewritten,
    is_written_in_python,
    reshape,
)
from sp_compiler.ir.fx import arguments, carries_gradient, placements_of, tensor_operands
from sp_compiler.ir.op_traits import FILLED, RESHAPES
from sp_compiler.ir.program import Region
from sp_compiler.rules.table import has_local_arguments

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_MESH_NAMES = ("sp_compiler.check",)
_CUTS = (aten.split_with_sizes.default, aten.slice.Tensor)


def check_forward(region: Region, world_size: int) -> CheckReport:
    """Raise an error for a sharded region whose forward mixes incompatible placements.

    Operators that ``spmd_types`` cannot type are typed by the rule table and listed in the report.

    Raises:
        PlacementError: with the operator, its module and line, the expected and the actual
            placements.
    """
    if world_size == 1:  # all placements hold the same numbers
        return CheckReport()
    return _Checker(region, world_size).run()


def _name_mesh_of_checker(world_size: int) -> None:
    """Let ``spmd_types`` ask DTensor about a mesh that no user's mesh is equal to.

    DTensor remembers what it answers by mesh, also for the next region and the next compilation,
    and its own one, which has no process group, would be taken for a user's mesh without names.
    """
    meshes = _shard_propagator._meshes
    if world_size not in meshes or meshes[world_size].mesh_dim_names != _MESH_NAMES:
        ranks = torch.arange(world_size, device="cpu")
        meshes[world_size] = DeviceMesh(
            "cpu", ranks, mesh_dim_names=_MESH_NAMES, _init_backend=False, _rank=0
        )


class _Unreadable(Exception):
    """``spmd_types`` has no rule for a node; the message says why."""


class _Checker:
    """One run of a region; ``values`` are meta tensors that carry the types of ``spmd_types``."""

    def __init__(self, region: Region, world_size: int) -> None:
        self.region = region
        self.world_size = world_size
        # spmd_types internals: an axis from numbers alone, for a DeviceMesh needs a process group.
        self.axis = MeshAxis(_make_axis_layout((world_size,), (1,)))
        self.values: dict[Node, Any] = {}
        self.report = CheckReport()

    def run(self) -> CheckReport:
        for node, placement in zip(
            self.region.placeholders, self.region.input_placements, strict=True
        ):
            # Whether a gradient flows decides whether R and I have to be told apart.
            grad = bool(node.meta.get("requires_grad"))
            self.values[node] = self._new(node.meta["val"], placement, grad)
        _name_mesh_of_checker(self.world_size)
        with typecheck(local=False), spmd.set_current_mesh({"tp": self.axis}):
            for node in self.region.module.graph.nodes:
                if node.op == "call_function":
                    self._check(node)
        for index, (node, placement) in enumerate(
            zip(self.region.outputs, self.region.output_placements, strict=True)
        ):
            self._require(node, self.values[node], placement, f"output {index}")
        return self.report

    def _check(self, node: Node) -> None:
        if node.target is operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]
        elif node.target in FILLED:
            # A constant is what sharding declares it to be, if a constant can be that.
            placement = self._choose(node, self._choices(node, self._operands(node)))
            self.values[node] = self._new(node.meta["val"], placement, False)
        elif declared_strategies(node, self.world_size) is not None:
            self._declare(node)
        else:
            self._type(node)
        # The placement that sharding declared is compared last: nothing above relied on it.
        claim = node.meta.get("placement")
        if claim is not None and isinstance(self.values[node], Tensor):
            self._require(node, self.values[node], claim, "its declared placement")
        self.report.checked += 1

    def _type(self, node: Node) -> None:
        try:
            self.values[node] = self._run(node)
            # A size among the arguments may have been taken for the global one of a shard: its type
            # would then be that of another call.
            if _shapes(self.values[node]) != _shapes(node.meta["val"]):
                raise _Unreadable("torch's function gives another shape on the meta device")
        except _Unreadable as reason:
            self._derive(node, str(reason))
        except spmd.SpmdTypeError as error:
            if not _is_unreadable(error):
                raise PlacementError(Pass.CHECK, self._refusal(node, error), node) from error
            self._derive(node, str(error.__cause__ or error).strip().splitlines()[0])
        # Failures inside the checker itself, or of a torch function that takes other arguments than
        # the operator of its name (tensordot). Before RuntimeError: NotImplementedError is a
        # subclass.
        except (AssertionError, LookupError, NotImplementedError, TypeError, ValueError) as error:
            self._derive(node, f"spmd_types cannot type {node.target}: {error}")
        # The operator itself refuses: the shapes do not fit, whatever the types.
        except RuntimeError as error:
            if not is_written_in_python(node):
                raise PlacementError(Pass.CHECK, self._refusal(node, error), node) from error
            self._derive(node, f"torch's function takes other arguments than {node.target}")

    def _run(self, node: Node) -> Any:
        placements = self._placements(node)
        name = node.target._schema.name
        if not placements:
            raise _Unreadable("spmd_types gives no type to what is made of no tensor")
        if node.target.namespace != "aten":
            raise _Unreadable("spmd_types does not know the user's operator")
        # It treats operators that it does not know as nonlinear: only a list of ours can tell that
        # from a refusal.
        if P in placements and name in UNKNOWN_LINEAR:
            raise _Unreadable("spmd_types does not know that it is linear")
        sharded = [placement for placement in placements if placement.is_sharded]
        # DTensor, which spmd_types asks, would take one rank's sizes for those of all.
        if sharded and has_local_arguments(node) and not is_rewritten(node):
            raise _Unreadable("sizes among its arguments are those of one rank")
        # Sharded by batch or heads, a rank has complete scores, and the mask changes no type; by
        # queries or keys its rows start elsewhere, which the mask would have to know.
        if node.target is _ATTENTION and any(p.dim > _dim_of_heads(node) for p in sharded):
            raise _Unreadable("spmd_types does not see the causal mask")
        claim = node.meta.get("placement", R)
        if node.target is torch.ops.aten.expand.default and claim.is_sharded and not sharded:
            raise _Unreadable("spmd_types knows no sharded dim that only the result has")
        if len(placements) != 1 or not placements[0].is_sharded:
            return call(node, self._operand_values(node))
        if node.target in RESHAPES:
            return self._reshape(node, placements[0])
        if node.target in _CUTS and _dim_of(node) == placements[0].dim:
            raise _Unreadable("spmd_types cannot cut a sharded dim")
        return call(node, self._operand_values(node))

    def _reshape(self, node: Node, placement: Placement) -> Tensor:
        """Reshape by ``unflatten`` and ``flatten``, the only ways to split and merge sharded dims.

        The rule table determines the sharded dim of the result; the checker confirms it.
        """
        target = self._choose(node, self._choices(node, self._operands(node)))
        source = self._operands(node)[0]
        # A sharded dim has one contiguous part per rank, to the checker: with segments a merged
        # dim would be typed as if the rank had the front of it.
        if source.segments or target.segments:
            raise _Unreadable("spmd_types knows no segments")
        x = self.values[node.args[0]]
        before = global_shape(x.shape, source, self.world_size)
        after = global_shape(node.meta["val"].shape, target, self.world_size)
        return reshape(x, before, after, target)

    # Nodes that spmd_types does not type itself.

    def _declare(self, node: Node) -> None:
        """Type one of the compiler's own operators by its declaration, which is trusted."""
        operand_placements = self._placements(node)
        pair = placements_of(node)
        if pair is not None:
            # A conversion says from which placement to which: that the operand is so is checked.
            source, target = pair
            self._require(node, self.values[node.args[0]], source, f"the operand of {node.name}")
            if not self._choices(node, [as_value(source, self.world_size)]):
                raise PlacementError(Pass.CHECK, f"no conversion {source} -> {target}", node)
            results: Sequence[Placement] = [target]
        else:
            operands = tuple(self._operands(node))
            fitting = [
                way.results
                for way in declared_strategies(node, self.world_size) or ()
                if tuple(as_value(p, self.world_size) for p in way.operands) == operands
            ]
            if not fitting:
                raise PlacementError(Pass.CHECK, self._refusal(node, None), node)
            # A result declared I is so whatever the operands are; one declared R follows them.
            results = [
                kind if kind == I else _gradient_kind(kind, operand_placements)
                for kind in fitting[0]
            ]
            self.report.trusted.append((node, "declared by the compiler's own operator"))
        self._set_types(node, results)

    def _derive(self, node: Node, reason: str) -> None:
        """Type a node that ``spmd_types`` cannot read by the rule table."""
        chosen = self._chosen(node, self._choices(node, self._operands(node)))
        operand_placements = self._placements(node)
        self._set_types(node, [_gradient_kind(kind, operand_placements) for kind in chosen])
        self.report.trusted.append((node, reason))

    def _choices(self, node: Node, operands: Sequence[Placement]) -> list[Results]:
        # The derivation runs operators without data, which the checker may not see.
        with spmd.no_typecheck():
            return derive(node, operands, self.world_size)

    def _chosen(self, node: Node, choices: Sequence[Results]) -> Results:
        """Return the placement among ``choices`` that sharding declared, or else the simplest."""
        if not choices:
            raise PlacementError(Pass.CHECK, self._refusal(node, None), node)
        claim = node.meta.get("placement")
        fitting = (c for c in choices if claim is None or as_value(claim, self.world_size) == c[0])
        return next(fitting, choices[0])

    def _choose(self, node: Node, choices: Sequence[Results]) -> Placement:
        return _gradient_kind(self._chosen(node, choices)[0], self._placements(node))

    def _set_types(self, node: Node, placements: Sequence[Placement]) -> None:
        values = [self.values[operand] for operand in tensor_operands(node)]
        grad = any(isinstance(x, Tensor) and x.requires_grad for x in values)
        value = node.meta["val"]
        if isinstance(value, (tuple, list)):
            self.values[node] = [
                self._new(item, kind, grad) for item, kind in zip(value, placements, strict=True)
            ]
        else:
            self.values[node] = self._new(value, placements[0], grad)

    # Types of meta tensors.

    def _new(self, value: Any, placement: Placement, needs_grad: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        with spmd.no_typecheck():
            x = torch.empty(value.shape, dtype=value.dtype, device="meta")
        x.requires_grad_(needs_grad and carries_gradient(x))
        kinds = {"R": spmd.R, "I": spmd.I, "P": spmd.P}
        kind = spmd.S(placement.dim) if placement.kind == "S" else kinds[placement.kind]
        return spmd.assert_type(x, {self.axis: kind})

    def _placement(self, x: Tensor) -> Placement:
        kind = spmd.get_local_type(x).get(self.axis)
        spec = spmd.get_partition_spec(x)
        # V alone says that ranks differ; the partition spec says on which dim.
        if kind is spmd.V and spec is not None:
            dims = [dim for dim, axis in enumerate(spec) if axis == self.axis]
            return S(dims[0])
        return {spmd.R: R, spmd.I: I, spmd.P: P}[kind]

    def _placements(self, node: Node) -> list[Placement]:
        by_operand = self._operand_values(node)
        values = [by_operand[operand] for operand in tensor_operands(node)]
        # No tensor: a number, which is the same on every rank.
        return [self._placement(x) if isinstance(x, Tensor) else R for x in values]

    def _operand_values(self, node: Node) -> dict[Node, Any]:
        """Operands of ``node``.

        Next to an invariant operand, a replicated one without gradient (a mask, positions) counts
        as invariant too: its numbers are equal, and it has no gradient to sum.
        """
        values = {operand: self.values[operand] for operand in tensor_operands(node)}
        tensors = {key: x for key, x in values.items() if isinstance(x, Tensor)}
        kinds = {key: self._placement(x) for key, x in tensors.items()}
        if I in kinds.values():
            constant = [
                x for x, kind in kinds.items() if kind == R and not tensors[x].requires_grad
            ]
            values |= {key: self._new(values[key], I, False) for key in constant}
        return values

    def _operands(self, node: Node) -> list[Placement]:
        """Placements of the operands as values; segments, unknown to the checker, as declared."""
        placements = []
        for operand, placement in zip(tensor_operands(node), self._placements(node), strict=True):
            claim = operand.meta.get("placement", placement)
            known = claim if _without_segments(claim) == placement else placement
            placements.append(as_value(known, self.world_size))
        return placements

    def _require(self, node: Node, x: Tensor, placement: Placement, what: str) -> None:
        actual = self._placement(x)
        wanted = _without_segments(placement)
        # R and I differ in the gradient alone: without one they are the same.
        same_numbers = actual.is_replicated and wanted.is_replicated and not x.requires_grad
        if actual != wanted and not same_numbers:
            raise PlacementError(
                Pass.CHECK, f"{what} is {placement}, but {node.name} has {actual}", node
            )

    def _refusal(self, node: Node, error: Exception | None) -> str:
        placed = zip(tensor_operands(node), self._placements(node), strict=True)
        got = ", ".join(f"{operand.name} {placement}" for operand, placement in placed) or "nothing"
        why = f": {str(error).strip().splitlines()[0]}" if error is not None else ""
        return f"{node.target} of {got} would give wrong numbers{why}"


def _shapes(value: Any) -> list[tuple[int, ...]]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tuple(item.shape) for item in values if isinstance(item, Tensor)]


def _dim_of(node: Node) -> int:
    args = arguments(node)
    return int(args["dim"] % args["self"].meta["val"].dim())


def _dim_of_heads(attention: Node) -> int:
    """Dims in front of it are a batch."""
    return int(arguments(attention)["query"].meta["val"].dim()) - 3


def _without_segments(placement: Placement) -> Placement:
    return S(placement.dim) if placement.kind == "S" else placement


def _gradient_kind(placement: Placement, operands: Sequence[Placement]) -> Placement:
    """Return R or I for a value that is only known to be replicated."""
    if not placement.is_replicated:
        return placement
    # R as soon as one operand is: its gradient is then a partial sum on every rank.
    return R if R in operands else I


def _is_unreadable(error: spmd.SpmdTypeError) -> bool:
    """Return whether the checker lacks a rule, as opposed to rejecting the operator.

    If DTensor would move data, it may only lack the sharding strategy that needs no communication
    (it runs a linear of three dims as ``bmm``, and before torch 2.13 a product of sharded heads by
    a view that it cannot shard); the rule table then decides.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (DTensorPropagationError, NotImplementedError)):
            return True
        if "Implicit redistribution" in str(cause) or "without redistribution" in str(cause):
            return True
        cause = cause.__cause__
    return False
