"""The README's Python examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(match[1], id=f"line{README.read_text().count(chr(10), 0, match.start()) + 1}")
    for match in EXAMPLE.finditer(README.read_text())
]


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(source: str) -> None:
    exec(compile(source, str(README), "exec"), {"__name__": "readme"})
