"""Where a node comes from, in words."""

from __future__ import annotations

import pytest
from torch.fx import Graph

from sp_compiler.base.provenance import node_origin

_CALLER = 'File "model.py", line 3, in forward\n    return self.act(x)\n'
_GENERATED = '  File "<eval_with_key>.5", line 9, in forward\n    cond = torch.ops.cond(x)\n'


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (None, ""),
        (_CALLER + _GENERATED, 'File "model.py", line 3, in forward\n    return self.act(x)'),
        (
            _CALLER + '  File "<ipython-input-1-2a>", line 7, in act\n    return x.exp()\n',
            'File "<ipython-input-1-2a>", line 7, in act\n    return x.exp()',
        ),
        (
            _CALLER + '  File "zipped.py", line 7, in act\n' + _CALLER.replace("3", "5"),
            'File "model.py", line 5, in forward\n    return self.act(x)',
        ),
        (_CALLER + '  File "zipped.py", line 7, in act\n', 'File "zipped.py", line 7, in act'),
    ],
    ids=["unknown", "generated", "typed in", "code unknown", "code of the last unknown"],
)
def test_the_line_of_a_node_is_the_innermost_of_the_user(trace: str | None, line: str) -> None:
    node = Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    assert node_origin(node) == f"  module: (model)\n    {line}".rstrip()
