"""A plan as one HTML page without scripts: memory over a step, saved tensors, collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from sp_compiler.base.units import bytes_text, time_text
from sp_compiler.planning.data import BlockPlan, KeptTensor, PlanData

_WIDTH, _HEIGHT = 960, 220
_FRAME_HEIGHT = 600  # what a screen shows of a notebook's cell; longer pages scroll inside
# Two pixels per bar: narrower ones cannot be distinguished or pointed at.
_MOST_BARS = 480
_COLORS = {"forward": "#3b76af", "backward": "#c8652d"}


@dataclass(frozen=True)
class _Bar:
    """A bar of the timeline, in pixels of the drawing."""

    x: float
    width: float
    height: float
    phase: str
    title: str


def page(plan: PlanData) -> str:
    """The text of the page."""
    # Escaped, because names of modules and lines of the model are untrusted text. StrictUndefined:
    # a renamed field fails here instead of leaving a blank on the page.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["bytes"] = bytes_text
    environment.filters["time"] = time_text
    template = files("sp_compiler.planning").joinpath("plan_page.html").read_text(encoding="utf-8")
    state = [
        ("parameters", plan.parameter_bytes),
        ("gradients", plan.gradient_bytes),
        ("optimizer", plan.optimizer_bytes),
        ("activations at the peak", plan.activation_peak_bytes),
    ]
    return environment.from_string(template).render(
        plan=plan,
        state=state,
        width=_WIDTH,
        height=_HEIGHT,
        colors=_COLORS,
        bars=list(_timeline(plan)),
        blocks=list(_tensors(plan)),
    )


def framed(text: str) -> str:
    """Return a notebook element that shows the page ``text``."""
    # In a frame: the page's styles would change the notebook, and its scripts could reach it.
    return (
        f'<iframe srcdoc="{escape(text)}" sandbox="allow-scripts" '
        f'style="width: 100%; height: {_FRAME_HEIGHT}px; border: 0"></iframe>'
    )


def _timeline(plan: PlanData) -> Iterator[_Bar]:
    """One bar per call and phase; in deep models neighbours share a bar, which shows their
    maximum."""
    moments = plan.timeline
    most = max((moment.num_bytes for moment in moments), default=0) or 1
    # Rounded up.
    group = -(-len(moments) // _MOST_BARS) or 1
    groups = [moments[first : first + group] for first in range(0, len(moments), group)]
    step = _WIDTH / max(1, len(groups))
    for number, members in enumerate(groups):
        # The largest, because a reader looks for the peak.
        moment = max(members, key=lambda member: member.num_bytes)
        call = plan.calls[moment.call]
        title = f"{moment.phase} of {call.path or call.block}: {bytes_text(moment.num_bytes)}"
        height = _HEIGHT * moment.num_bytes / most
        yield _Bar(number * step, step, height, moment.phase, title)


def _tensors(plan: PlanData) -> Iterator[tuple[BlockPlan, list[tuple[KeptTensor, float]]]]:
    """Rows of the tensors that each block saves, largest first, as percent of the largest of
    all."""
    saved = [tensor for block in plan.blocks for tensor in (*block.kept, *block.sent)]
    most = max((tensor.num_bytes for tensor in saved), default=1)
    for block in plan.blocks:
        ordered = sorted((*block.kept, *block.sent), key=lambda tensor: -tensor.num_bytes)
        if ordered:
            yield block, [(tensor, 100 * tensor.num_bytes / most) for tensor in ordered]
