"""README and site: their Python runs as it stands, and what they name is there."""

import configparser
import re
import runpy
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run
from helpers.tu_sets import write_tu_set

import pgcl_losses

README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


# What Lightning, the dependencies of PyGCL and PyG's sampler without pyg-lib warn of.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:Using 'NeighborSampler' without",
)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p != QUICKSTART and blocks(p, "python")], ids=lambda p: p.stem
)
def test_blocks_of_a_page_run_in_their_order(page):
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


def test_the_quickstart_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    """On a small set in the folder that it names: without internet, with other numbers."""
    monkeypatch.chdir(tmp_path)
    write_tu_set(tmp_path / "data" / "MUTAG" / "raw", "MUTAG", [0, 1] * 12, node_types=7)
    names = {"__name__": "page"}
    for block in blocks(QUICKSTART, "python"):
        exec(compile(block, QUICKSTART.name, "exec"), names)
    (shown,) = blocks(QUICKSTART, "text")
    numbers = re.compile(r"-?(\d+\.\d|nan)")
    assert numbers.sub("", capsys.readouterr().out) == numbers.sub("", shown)


@pytest.mark.parametrize("block", blocks(README, "python"))
def test_blocks_of_the_readme_run_by_themselves(block):
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_commands_name_scripts_that_are_there(page):
    text = page.read_text()
    for script in re.findall(r"python ((?:examples|benchmarks|docs)/[\w/]+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"-m ((?:experiments|benchmarks)[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module


def anchors_of(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), target
            assert not anchor or anchor in anchors_of(there), target


def test_the_readme_leads_to_the_pages_that_strangers_need():
    text = README.read_text()
    for name in ("swap", "how_it_works", "choosing", "distributed", "troubleshooting", "results"):
        assert f"(docs/{name}.md)" in text


def test_targets_of_make_are_there():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"^make (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE):
        assert target in targets


def test_every_public_name_has_a_place_in_the_reference():
    reference = (ROOT / "docs" / "api.md").read_text()
    for name in pgcl_losses.__all__:
        assert re.search(rf":: {name}$", reference, flags=re.MULTILINE), name


def test_one_version():
    version = pgcl_losses.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"pgcl_losses-{version}-py3-none-any.whl" in (ROOT / "docs" / "install.md").read_text()
    heading = "Unreleased]" if "dev" in version else f"{version}] - 20"
    assert f"\n## [{heading}" in (ROOT / "CHANGELOG.md").read_text()


DESCRIBED = {
    None: "[![badge](https://x.io/b)](LICENSE) ![how](docs/how.png) [a `b`](a.md#c) [up](#up) [d](https://d.org)",
    "no source": "![badge](https://x.io/b)  a `b` up [d](https://d.org)",
    "https://host/us": "[![badge](https://x.io/b)](https://host/us/blob/v1.2/LICENSE)"
    " ![how](https://host/us/raw/v1.2/docs/how.png)"
    " [a `b`](https://host/us/blob/v1.2/a.md#c) up [d](https://d.org)",
}


@pytest.mark.parametrize("source", ["no source", "https://host/us"])
def test_the_long_description_has_links_that_lead_somewhere_or_none(source):
    describe = runpy.run_path(str(ROOT / "setup.py"))["describe"]
    code = "\n```python\nlayers[0](x)\n```\n"
    given = None if source == "no source" else source
    assert describe(DESCRIBED[None] + code, given, "1.2") == DESCRIBED[source] + code


def test_the_projects_source_is_read_from_one_place(tmp_path):
    source_in = runpy.run_path(str(ROOT / "setup.py"))["source_in"]
    config = tmp_path / "setup.cfg"
    config.write_text("[metadata]\nname = x\n")
    assert source_in(config) is None
    config.write_text(
        "[metadata]\nproject_urls =\n    Docs = https://d.org\n    Source = https://host/us\n"
    )
    assert source_in(config) == "https://host/us"


def test_extras_that_pages_and_programs_name_are_there():
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    places = [*TEXTS, *(ROOT / "adapters").glob("*.py"), *(ROOT / "examples").glob("*.py")]
    places += [*(ROOT / "experiments").rglob("*.py"), ROOT / "Makefile", ROOT / ".ci" / "run"]
    for place in places:
        for named in re.findall(r"pip install [^\n]*?(?:\.|whl)\[([\w,]+)\]", place.read_text()):
            assert set(named.split(",")) <= extras, (place, named)
    table = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == extras


def test_pictures(tmp_path):
    images = tmp_path / "images"
    run("docs/draw.py", f"--output={images}")
    for name in ("how", "architecture"):
        assert (images / f"{name}.png").read_bytes().startswith(b"\x89PNG")
