"""README and site: their Python runs as it stands, and what they name is there."""

import re
from pathlib import Path

import pytest
from helpers.scripts import ROOT, run

import pgcl_losses

README = ROOT / "README.md"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tutorials").glob("*.md")])
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
TEXTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


# What Lightning and the dependencies of PyGCL warn of.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*does not have many workers"
)
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_blocks_of_a_page_run_in_their_order(page):
    names = {"__name__": "page"}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


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


@pytest.mark.parametrize("page", [*TEXTS, *TUTORIALS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), target
            assert not anchor or anchor in anchors_of(there), target


def test_the_start_page_has_the_readmes_two_commands():
    for command in blocks(ROOT / "docs" / "index.md", "bash"):
        assert command in README.read_text()


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
    assert f"\nversion: {pgcl_losses.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_pictures(tmp_path):
    images = tmp_path / "images"
    run("docs/draw.py", f"--output={images}")
    for name in ("how", "decision", "architecture"):
        assert (images / f"{name}.png").read_bytes().startswith(b"\x89PNG")
