"""The Python examples of README and of the documentation's pages run as they stand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/tutorial.md", ROOT / "docs/migration.md"]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> Iterator[object]:
    for page in PAGES:
        text = page.read_text()
        for match in EXAMPLE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield pytest.param(page, match[1], id=f"{page.stem}-line{line}")


@pytest.mark.parametrize("page, source", list(examples()))
def test_example_runs(page: Path, source: str) -> None:
    exec(compile(source, str(page), "exec"), {"__name__": "readme"})
