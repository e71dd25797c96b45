"""The long description: the README without its relative links and pictures.

A package index shows it beside no other file, so a relative link leads nowhere there. If setup.cfg
names the project's source, links lead to it; otherwise their words stay and the links go.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
LINK = re.compile(r"(!?)\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\((?!https?:)([^)\s]+)\)")


def describe(readme: str, source: str | None, version: str) -> str:
    """The README with every relative link made absolute, or taken out where there is no source."""

    def elsewhere(link: re.Match[str]) -> str:
        picture, words, path = link.groups()
        if path.startswith("#"):
            return words
        if source is None:
            return "" if picture else words
        return f"{picture}[{words}]({source}/{'raw' if picture else 'blob'}/v{version}/{path})"

    # Blocks of code, which come at odd places, stay as they are.
    parts = re.split(r"(^```.*?^```$)", readme, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(elsewhere, part) for part in parts[::2]]
    return re.sub(r"\n{3,}", "\n\n", "".join(parts))


def source_in(config: Path) -> str | None:
    """``Source`` of ``project_urls``, if it is there."""
    metadata = configparser.ConfigParser(interpolation=None)
    metadata.read(config)
    urls = metadata.get("metadata", "project_urls", fallback="").splitlines()
    named = dict(re.split(r"\s*=\s*", url.strip(), maxsplit=1) for url in urls if "=" in url)
    return named.get("Source")


def version_in(package: Path) -> str:
    found = re.search(r'^__version__ = "(.+)"$', package.read_text(), flags=re.MULTILINE)
    assert found, f"{package} has no __version__"
    return found[1]


if __name__ == "__main__":
    version = version_in(ROOT / "pgcl_losses" / "__init__.py")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(long_description=describe(readme, source_in(ROOT / "setup.cfg"), version))
