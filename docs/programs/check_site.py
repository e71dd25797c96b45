"""Look for faults that Sphinx builds without a warning.

python -m docs.programs.check_site docs/_build

Every page is checked for text that an unclosed fence left raw, for a heading that it has twice, and
for links to pages, files and anchors of the site that are not there.
"""

import argparse
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

HEADINGS = {f"h{level}" for level in range(1, 7)}
RAW = "```", "{include}", "{toctree}", "<!--"  # markup, where it is no code that a page shows


class Page(HTMLParser):
    """The anchors, links, headings and the plain text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors, self.links = {""}, set[str]()
        self.headings, self.text = list[str](), ""
        self.is_heading = self.is_article = False
        self.shown = 0  # how many elements are open in which markup is shown as it stands
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {given.get("id") or "", given.get("name") or ""}
        self.links |= {x for name in ("href", "src") if (x := given.get(name))}
        self.is_article |= tag == "article"
        self.shown += tag in ("code", "style", "script")
        if tag in HEADINGS and self.is_article:
            self.is_heading = True
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_heading &= tag not in HEADINGS
        self.is_article &= tag != "article"
        self.shown -= tag in ("code", "style", "script")

    def handle_data(self, data: str) -> None:
        if self.is_heading:
            self.headings[-1] += data
        if not self.shown:
            self.text += data


def faults(root: Path) -> list[str]:
    """What is wrong with the pages of a folder, a line each."""
    pages = {path.resolve(): Page(path.read_text()) for path in sorted(root.rglob("*.html"))}
    found = [] if pages else [f"{root} has no page"]
    for path, page in pages.items():
        name = path.relative_to(root.resolve())
        found += [f"{name}: shows {raw!r}" for raw in RAW if raw in page.text]
        twice = [title for title, number in Counter(page.headings).items() if number > 1]
        found += [f"{name}: has the heading {title!r} twice" for title in twice]
        for link in sorted(page.links):
            there = urlsplit(link)
            if there.scheme or there.netloc:
                continue
            target = (path.parent / unquote(there.path)).resolve() if there.path else path
            if not target.exists():
                found.append(f"{name}: {link} does not exist")
            elif target in pages and unquote(there.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} has no such anchor")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("site", type=Path, help="the folder of the built pages")
    if found := faults(parser.parse_args().site):
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
