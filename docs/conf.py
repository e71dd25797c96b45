"""The documentation site: ``make docs``, or ``sphinx-build --fail-on-warning docs docs/_build``."""

import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx

import pgcl_losses

project = "pgcl-losses"
author = "The pgcl-losses authors"
copyright = f"2026, {author}"
release = pgcl_losses.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
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
toc_object_entries_show_parents = "hide"  # forward(), not SinkhornPrototypes.forward()
maximum_signature_line_length = 88  # longer ones have one parameter a line
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"pgcl-losses {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]


def as_with_frameworks(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """No whole paths in signatures."""
    return signature and re.sub(r"\b(dgl|torch_geometric\.data)\.(?=[A-Z])", "", signature), returns


def link_pages(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """A docstring names a page as a file, ``(docs/negatives.md)``; the site links it."""
    lines[:] = [re.sub(r"\(docs/(\w+)\.md\)", r"(:doc:`\1`)", line) for line in lines]


def visit_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """A formula in MathML, which browsers show by themselves: no script, no network, no TeX."""
    is_block = isinstance(node, nodes.math_block)
    markup = tex2mathml(node.astext(), as_block=is_block)
    # Browsers set no space beside the name of a function: "q log p", not "qlogp".
    markup = re.sub(
        r"<mi>(\w+)</mi>\s*<mo>&ApplyFunction;</mo>",
        r'<mo lspace="0.17em" rspace="0.17em" form="prefix">\1</mo>',
        markup.replace("'", "\N{PRIME}"),
    )
    translator.body.append(f'<div class="formula">{markup}</div>' if is_block else markup)
    raise nodes.SkipNode


def link_pictures(app: Sphinx, tree: nodes.document) -> None:
    """On a small screen a picture cannot be read; Sphinx links scaled ones to their full size."""
    for picture in tree.findall(nodes.image):
        if not picture["uri"].startswith("data:"):  # of a notebook, inside the page
            picture["scale"] = 100


def mark_for_search(app: Sphinx, page: str, source: list[str]) -> None:
    """`<!-- search: DDP, hang -->` under a heading: the search shows it first for these words."""
    source[0] = re.sub(
        r"<!-- search: (.+) -->",
        lambda words: "```{index} ! " + words[1].replace(", ", ", ! ") + "\n```",
        source[0],
    )


def show_notebook(app: Sphinx, page: str, source: list[str]) -> None:
    """A page that only links to a notebook shows its text, its code and the outputs in the file."""
    link = re.fullmatch(r"\[.+\]\((.+\.ipynb)\)\n", source[0])
    if link is None:
        return
    notebook = Path(app.srcdir, link[1])
    app.env.note_dependency(str(notebook))
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        for output in cell.get("outputs", []):
            if "text" in output:
                parts.append("```text\n" + "".join(output["text"]).strip() + "\n```")
            else:
                picture = "".join(output["data"]["image/png"]).strip()
                parts.append(f"![output of the code](data:image/png;base64,{picture})")
    # Links of the notebook start at its folder, and links of the page at docs/.
    text = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", "\n\n".join(parts))  # another notebook's page
    text = text.replace("](../../docs/", "](").replace("](../", "](../examples/")
    source[0] = f"{text}\n\n[Download this notebook]({link[1]})\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", show_notebook)
    app.connect("source-read", mark_for_search)
    app.connect("doctree-read", link_pictures)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("autodoc-process-signature", as_with_frameworks)
    app.connect("autodoc-process-docstring", link_pages)
