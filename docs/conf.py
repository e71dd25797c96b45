"""The documentation site: ``make docs``, or ``sphinx-build --fail-on-warning docs docs/_build``."""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

import pgcl_losses

sys.path.insert(0, str(Path(__file__).parent))  # for the extension here

project = "pgcl-losses"
author = "The pgcl-losses authors"
copyright = f"2026, {author}"
release = pgcl_losses.__version__

extensions = [
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
html_math_renderer = "mathml"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
napoleon_custom_sections = ["Shape"]
# Frameworks are never imported, so that the site is the same with and without them.
autodoc_mock_imports = ["dgl", "torch_geometric"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"pgcl-losses {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]


def as_with_frameworks(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """Signatures without the traces of a mock: a base that takes anything, and whole paths."""
    if what == "class" and signature == "(*args: Any, **kwargs: Any)":
        real = inspect.signature(thing.__init__)
        real = real.replace(
            parameters=[*real.parameters.values()][1:], return_annotation=real.empty
        )
        signature = stringify_signature(real, unqualified_typehints=True)
    return signature and re.sub(r"\b(dgl|torch_geometric\.data)\.(?=[A-Z])", "", signature), returns


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", as_with_frameworks)
