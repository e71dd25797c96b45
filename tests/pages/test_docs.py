"""README and site: their Python runs as it stands, what they name exists, and tables are filled."""

import configparser
import re
import runpy

import pytest
import torch
from helpers.scripts import ROOT, run
from torch import nn

import pgcl_losses
from benchmarks import tables
from docs.programs import presets
from pgcl_losses import InfoNCE
from pgcl_losses.presets import PRESETS

DOCS = ROOT / "docs"
README, QUICKSTART = ROOT / "README.md", DOCS / "quickstart.md"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*sorted(ROOT.glob("*.md")), *PAGES]
each_text = pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)


def blocks(page, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def marks_of(text):
    """What the code of a page needs."""
    marks = [pytest.mark.dgl] if "import dgl" in text else []
    if "import fully_shard" in text:
        no_fsdp2 = torch.__version__ < "2.6"
        marks.append(pytest.mark.skipif(no_fsdp2, reason="torch before 2.6 has no fully_shard"))
    return marks


def run_blocks(page):
    names = {"__name__": "page"}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)
    return names


# What Lightning, the dependencies of PyGCL and PyG's sampler without pyg-lib warn of.
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:Using 'NeighborSampler' without",
)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=marks_of(text))
        for page in (README, *PAGES)
        if page != QUICKSTART and (text := "".join(blocks(page)))
    ],
)
def test_blocks_of_a_page_run_in_their_order(page):
    run_blocks(page)


def test_the_quickstart_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    """On 200 digits for one epoch, with other numbers. All other code is as it stands."""
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(QUICKSTART)
    assert len(block.splitlines()) <= 90
    for whole, little in (("EPOCHS = 3, 20", "EPOCHS = 1, 1"), (".images", ".images[:200]")):
        assert block.count(whole) == 1
        block = block.replace(whole, little)
    exec(block, {"__name__": "page"})
    (shown,) = blocks(QUICKSTART, "text")
    numbers = re.compile(r"\d+\.\d")
    assert numbers.sub("", capsys.readouterr().out) == numbers.sub("", shown)
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_training_resumes_bit_for_bit():
    names = run_blocks(DOCS / "training.md")
    torch.set_rng_state(names["state"]["random"])
    names["train"](**names["parts"], epochs=range(4, 8))  # without a stop
    model, resumed = (of["model"].state_dict() for of in (names["parts"], names["resumed"]))
    for name, value in model.items():
        assert torch.equal(value, resumed[name]), name


@each_text
def test_commands_name_what_exists(page):
    text = page.read_text()
    for script in re.findall(r"python ((?:examples|benchmarks)/[\w/]+\.py)", text):
        assert (ROOT / script).exists(), script
    for module in re.findall(r"-m ((?:experiments|benchmarks|docs)[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"^make (\w+)", text, flags=re.MULTILINE)) <= {*targets}


def anchors_of(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_text
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith("http"):
            file, _, anchor = target.partition("#")
            there = page.parent / file if file else page
            assert there.exists(), target
            assert not anchor or anchor in anchors_of(there), target


def test_the_description_on_pypi_has_no_relative_links():
    described = runpy.run_path(str(ROOT / "setup.py"))["described"]
    link, picture = "[a `b`](docs/swap.md#graphs)", "![how](docs/images/how.png)"
    badge = "[![MIT](https://img.shields.io/b)](LICENSE)"
    text = f"{badge} {link}, {picture} [web](https://a.b/c)"
    there = "https://example.org/p"
    assert described(text, there) == (
        f"[![MIT](https://img.shields.io/b)]({there}/blob/main/LICENSE) "
        f"[a `b`]({there}/blob/main/docs/swap.md#graphs), "
        f"![how]({there}/raw/main/docs/images/how.png) [web](https://a.b/c)"
    )
    assert described(text, "") == "![MIT](https://img.shields.io/b) a `b`,  [web](https://a.b/c)"
    for url in (there, ""):
        links = re.findall(r"\]\((.*?)\)", described(README.read_text(), url))
        assert links
        assert all(link.startswith("https://") for link in links)


def test_every_public_name_has_a_place_in_the_reference():
    reference = (DOCS / "api.md").read_text()
    for name in pgcl_losses.__all__:
        assert re.search(rf":: {name}$", reference, flags=re.MULTILINE), name


def test_the_page_of_the_architecture_names_what_exists():
    page, root = (DOCS / "architecture.md").read_text(), ROOT / "pgcl_losses"
    package = {path.relative_to(root): path.read_text() for path in root.rglob("*.py")}
    tree, folder = set(), root
    block = blocks(DOCS / "architecture.md", "text")[0]
    for names in re.findall(r"^ +([\w/]+(?:, \w+)*) {2,}", block, flags=re.MULTILINE):
        folder = root / names if names.endswith("/") else folder
        tree |= {folder / f"{name}.py" for name in names.split(", ") if not name.endswith("/")}
    assert {path.relative_to(root) for path in tree} == {
        path for path in package if path.name != "__init__.py"
    }
    named = re.findall(r"`([\w./]+)(?:\(\))?`", page)
    files = {name for name in named if name.endswith(".py")}
    assert files <= {f"{path}" for path in package} | {path.name for path in package}
    words = {*re.findall(r"\w+", " ".join(package.values())), *dir(nn.Module), *dir(nn.parallel)}
    for name in {*named} - files - {"adapters/", "setup.cfg"}:
        assert {*name.split(".")} <= words, name


def test_one_version():
    version = pgcl_losses.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    for text in TEXTS:
        wheels = re.findall(r"pgcl_losses-([\w.]+)-py3-none-any\.whl", text.read_text())
        assert {*wheels} <= {version}, text
    heading = "Unreleased]" if "dev" in version else f"{version}] - 20"
    assert f"\n## [{heading}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_and_groups_that_pages_and_programs_name_exist():
    """A wheel has the extras of its adapters alone; a checkout has groups."""
    config = configparser.ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    extras = set(config["options.extras_require"])
    assert extras == {"pyg", "dgl"}
    groups = (ROOT / "pyproject.toml").read_text().partition("[dependency-groups]")[2]
    groups = set(re.findall(r"^(\w+) = \[", groups.partition("\n[")[0], flags=re.MULTILINE))
    folders = ("adapters", "examples", "experiments", "benchmarks", ".ci", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    for place in [*TEXTS, ROOT / "Makefile", *files]:
        text = place.read_text() if place.suffix in ("", ".md", ".py", ".yml") else ""
        for named in re.findall(r"pip install [^\n]*?(?:\.|whl)\[([\w,]+)\]", text):
            assert {*named.split(",")} <= extras, place
        assert {*re.findall(r"--group (\w+)", text)} <= groups, place


def test_the_pages_count_the_scripts():
    assert f"losses of {len(PRESETS)} published scripts" in (ROOT / "README.md").read_text()
    by_name = f"losses of {len(InfoNCE.names())} scripts by name"
    assert by_name in (DOCS / "swap.md").read_text().replace("\n", " ")


def test_the_catalogue_has_the_tables_of_presets():
    page = (DOCS / "catalogue.md").read_text()
    assert presets.filled(page) == page


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_of_speed_are_those_of_the_records(page):
    assert tables.filled(page) == page.read_text()


def test_pictures_are_drawn_for_the_pages(tmp_path):
    images = tmp_path / "images"
    run("-m", "docs.programs.draw", f"--output={images}")
    pictures = list(images.iterdir())
    assert "how.png" in [picture.name for picture in pictures]
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert any(f"images/{picture.name})" in page.read_text() for page in TEXTS), picture.name
