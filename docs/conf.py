"""The documentation site: ``sphinx-build -W docs docs/_build``."""

import sys
from pathlib import Path

import pgcl_losses

sys.path.insert(0, str(Path(__file__).parent))

project = "pgcl-losses"
author = "The pgcl-losses authors"
copyright = f"2026, {author}"
release = pgcl_losses.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "notebooks",  # the file beside this one: tutorials are Python files
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
napoleon_custom_sections = ["Shape"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"pgcl-losses {release}"
