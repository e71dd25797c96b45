"""The checks of the built site find what Sphinx builds without a warning."""

import pytest
from helpers.scripts import ROOT, run

from docs.programs.check_site import faults

GOOD = """<a href="#beyond">outside</a><article><h1 id="top">Top</h1><p>text <code>```</code></p>
<a href="#top"></a><a href="other.html#here"></a><a href="https://a.b/c"></a><img src="a.png">
</article><h1 id="beyond">Top</h1>"""


def site(folder, page):
    (folder / "index.html").write_text(page)
    (folder / "other.html").write_text('<article><h2 id="here">Here</h2></article>')
    (folder / "a.png").write_bytes(b"")
    return folder


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("<code>```</code>", "```{include} ../README.md", "index.html: shows '```'"),
        ("text", "&lt;!-- try it --&gt;", "index.html: shows '<!--'"),
        ("</article>", "<h2>Top</h2></article>", "index.html: has the heading 'Top' twice"),
        ("other.html#here", "other.html#there", "index.html: other.html#there has no such anchor"),
        ('"#top"', '"#bottom"', "index.html: #bottom has no such anchor"),
        ("other.html#here", "gone.html", "index.html: gone.html does not exist"),
        ("a.png", "b.png", "index.html: b.png does not exist"),
    ],
)
def test_a_fault_is_found(tmp_path, before, after, fault):
    assert before in GOOD
    assert fault in faults(site(tmp_path, GOOD.replace(before, after)))


def test_a_site_without_faults(tmp_path):
    assert faults(site(tmp_path, GOOD)) == []
    run("-m", "docs.programs.check_site", str(tmp_path))


def test_the_site_is_checked_where_it_is_built():
    for place in (ROOT / "Makefile", ROOT / ".ci" / "run"):
        _, _, after = place.read_text().partition("sphinx-build")
        assert "python -m docs.programs.check_site docs/_build" in after, place
