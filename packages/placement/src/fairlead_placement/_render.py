# SPDX-License-Identifier: Apache-2.0
"""Rich renderables as plain text and as notebook HTML."""

import io

from rich.console import Console, RenderableType

__all__ = ["as_html", "as_text"]


def as_text(renderable: RenderableType, *, width: int = 110) -> str:
    """Without colours and control codes, for messages and logs."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def as_html(renderable: RenderableType, *, width: int = 110) -> str:
    """A `<pre>` with inline styles, for `_repr_html_`."""
    console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')
