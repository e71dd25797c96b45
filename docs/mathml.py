"""Formulas as MathML, which browsers show by themselves: no script, no network, no TeX."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def mathml(formula: str, display: str) -> str:
    # The sign of a prime is small and high by itself; as a superscript it could not be seen.
    markup = convert(formula.replace("'", "\N{PRIME}"), display=display)
    if "\\" in markup:  # a command that the converter does not know
        logger.warning("MathML has no place for a part of %r", formula)
    # Names of functions stand by themselves, as in TeX: "q log p", not "qlogp".
    return re.sub(
        r"<mi>(log|exp)</mi>", r'<mo lspace="0.17em" rspace="0.17em" form="prefix">\1</mo>', markup
    )


def visit_math(translator: Any, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_math_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
