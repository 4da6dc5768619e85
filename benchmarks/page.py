"""Records as one HTML page that needs no other file: tables, and plots as SVG."""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from benchmarks.plots import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.45 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; margin: 0.6em 0; }
th, td { padding: 1px 8px; text-align: right; border-bottom: 1px solid #ddd; }
pre { background: #f4f4f4; padding: 0.5em; white-space: pre-wrap; }
div.wide { overflow-x: auto; }
p.missing { background: #fdf0d5; padding: 0.5em; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, parts: Iterable[str]) -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def escape(text: object) -> str:
    return html.escape(str(text))


def element(name: str, text: object, kind: str = "") -> str:
    """An element of plain text."""
    return f"<{name}{f' class={kind}' if kind else ''}>{escape(text)}</{name}>"


def table(lines: Sequence[dict[str, str]]) -> str:
    """Lines by column, in one table for each run of lines with the same columns."""
    tables = []
    for columns, same in groupby(lines, key=list):
        rows = ["".join(element("th", name) for name in columns)]
        rows += ["".join(element("td", text) for text in line.values()) for line in same]
        tables.append("<table>" + "".join(f"<tr>{row}</tr>\n" for row in rows) + "</table>")
    return '<div class="wide">' + "\n".join(tables) + "</div>"


def drawn(drawing: Drawing, data: dict[str, Any]) -> str:
    """The figures of a record; a line that says what is missing without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return element("p", "No plots: matplotlib is not installed.", "missing")
    return "\n".join(svg(figure, f"figure{i}") for i, (_, figure) in enumerate(drawing(data)))


def svg(figure: Figure, salt: str) -> str:
    """The figure as a small SVG element, the same for the same figure."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"\s*\n\s*", " ", text[text.index("<svg") :])
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "sans-serif", text)  # a long list in each text
    return re.sub(r"(\d\.\d\d)\d+", r"\1", text)
