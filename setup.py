"""What setup.cfg cannot say: the description on PyPI is README.md without relative links."""

import configparser
import re
from pathlib import Path

HERE = Path(__file__).parent
RELATIVE = (
    r"(!?)\[((?:!\[.*?\]\(.*?\)|[^\]])*)\]\((?!https?:)(.*?)\)"  # [text](target), ![text](target)
)


def described(readme: str, url: str) -> str:
    """Relative links and pictures lead to the repository; without its address they are left out."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if url:
            return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/main/{target})"
        return "" if picture else text

    return re.sub(RELATIVE, absolute, readme)


if __name__ == "__main__":
    from setuptools import setup

    config = configparser.ConfigParser(interpolation=None)
    config.read(HERE / "setup.cfg")
    url = config["metadata"].get("url", "")
    pages = {"Changelog": f"{url}/blob/main/CHANGELOG.md", "Issues": f"{url}/issues"}
    setup(
        long_description=described((HERE / "README.md").read_text(encoding="utf-8"), url),
        project_urls=pages if url else {},
    )
