"""How Sphinx builds these pages into a site: `make docs`."""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flash_attn import __version__  # noqa: E402

project = "flash-attn"
author = "the authors of flash-attn"
version = release = __version__
# Links to files outside of docs/ lead to the repository, if its address is given, else to copies.
URL = os.environ.get("FLASH_ATTN_URL", "")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
templates_path = ["_templates"]
html_theme = "furo"
html_title = f"flash-attn {version}"
html_copy_source = False
html_show_copyright = False
nitpicky = False

myst_heading_anchors = 4  # the same as GitHub's
autodoc_inherit_docstrings = False  # torch.nn.Module's
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_google_docstring = False
napoleon_use_rtype = False
# Docstrings have Python's `x` for code.
default_role = "code"


def complete(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make the pages that the index lists the site's contents, in that order."""
    if docname == "index":
        pages = "\n".join(re.findall(r"^- \[[^]]*\]\(([\w-]+)\.(?:md|rst)\)", source[0], re.M))
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
    if URL:
        source[0] = re.sub(r"(?<!!)(\[[^]]*\]\()\.\./", rf"\1{URL}/blob/main/", source[0])


def skip(app: Sphinx, what: str, name: str, member: object, skipped: bool, options: object) -> bool:
    """Leave out what a module has from another package, such as einops.rearrange."""
    return skipped or not getattr(member, "__module__", "flash_attn").startswith("flash_attn")


def setup(app: Sphinx) -> None:
    app.connect("source-read", complete)
    app.connect("autodoc-skip-member", skip)
