"""sp_compiler: turn an unmodified transformer into a tensor- and sequence-parallel module."""

from __future__ import annotations

from sp_compiler.api import compile, pipeline, plan
from sp_compiler.base.errors import (
    ArgumentError,
    CaptureError,
    NotCompiledError,
    PassError,
    PlacementError,
    RankFailureError,
    RankMismatchError,
    SPCompilerError,
    UnsupportedError,
)
from sp_compiler.base.pass_report import PassReport
from sp_compiler.cost.hardware import Hardware, Link
from sp_compiler.cost.measure import profile
from sp_compiler.emulation.clock import VirtualClock
from sp_compiler.emulation.group import emulated_group
from sp_compiler.graph_diff.diff import GraphDiff, diff
from sp_compiler.grid.gradient_norm import clip_grad_norm_
from sp_compiler.grid_plan.data import GridPlan
from sp_compiler.grid_plan.suggest import suggest
from sp_compiler.grid_plan.suggestions import Suggestions
from sp_compiler.ir.hints import forbid
from sp_compiler.pipeline_parallel.pipeline_module import PipelineModule
from sp_compiler.planning.plan import Plan
from sp_compiler.rules.custom import rule
from sp_compiler.runtime.failures.fresh_store import fresh_store
from sp_compiler.runtime.mesh_axes import data_shard
from sp_compiler.verification.report import VerifyReport
from sp_compiler.verification.verify import verify

__all__ = [
    "ArgumentError",
    "CaptureError",
    "GraphDiff",
    "GridPlan",
    "Hardware",
    "Link",
    "NotCompiledError",
    "PassError",
    "PassReport",
    "PipelineModule",
    "PlacementError",
    "Plan",
    "RankFailureError",
    "RankMismatchError",
    "SPCompilerError",
    "Suggestions",
    "UnsupportedError",
    "VerifyReport",
    "VirtualClock",
    "clip_grad_norm_",
    "compile",
    "data_shard",
    "diff",
    "emulated_group",
    "forbid",
    "fresh_store",
    "pipeline",
    "plan",
    "profile",
    "rule",
    "suggest",
    "verify",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The public names, without the subpackages."""
    return [*__all__, "__version__"]
