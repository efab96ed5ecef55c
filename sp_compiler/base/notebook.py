"""Pages inside the cells of a notebook."""

from __future__ import annotations

import html

_HEIGHT_PX = 600  # what a screen shows of a cell; longer pages scroll inside


def framed(page: str) -> str:
    """Return an element that shows ``page``, a document of its own."""
    # In a frame: the styles of a page would change the notebook's, and its scripts reach it.
    return (
        f'<iframe srcdoc="{html.escape(page)}" sandbox="allow-scripts" '
        f'style="width: 100%; height: {_HEIGHT_PX}px; border: 0"></iframe>'
    )
