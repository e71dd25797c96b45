"""docs/tutorials: each runs, prints what its page shows, and is a notebook."""

import os
import re

import jupytext
import notebooks
import pytest
from helpers.scripts import ROOT, run

NAMES = [path.stem for path in notebooks.TUTORIALS]
FOLDER = ROOT / "docs" / "tutorials"


def words(text: str) -> str:
    """Without numbers, which differ from one machine to the next."""
    return re.sub(r"[\d.]+(e-\d+)?", "", text).replace(" ", "")


def numbers(text: str, line: str) -> list[float]:
    (rest,) = re.findall(rf"^{line} +(.*)$", text, flags=re.MULTILINE)
    return [float(number) for number in re.findall(r"\d+\.\d+", rest)]


@pytest.fixture(scope="module")
def run_anew(tmp_path_factory):
    """Runs a tutorial in a folder: what it printed, and its picture."""

    def call(name: str) -> tuple[str, bytes]:
        folder = tmp_path_factory.mktemp(name) / "output"
        run("docs/notebooks.py", name, f"--output={folder}")
        return (folder / f"{name}.txt").read_text(), (folder / f"tutorial-{name}.png").read_bytes()

    return call


def test_swap_prints_what_its_page_shows(run_anew):
    printed, picture = run_anew("swap")
    assert words(printed) == words((FOLDER / "swap.txt").read_text())
    assert picture.startswith(b"\x89PNG")


def test_cora_prints_what_its_page_shows_and_says(run_anew):
    printed, picture = run_anew("cora")
    assert words(printed) == words((FOLDER / "cora.txt").read_text())
    assert picture.startswith(b"\x89PNG")
    for of_run in zip(
        numbers(printed, "paper"),
        numbers(printed, "paper, initialised"),
        numbers(printed, "InfoNCE"),
        strict=True,
    ):
        assert list(of_run) == sorted(of_run)


def test_two_processes_print_what_their_page_shows(run_anew):
    printed, picture = run_anew("processes")
    assert words(printed) == words((FOLDER / "processes.txt").read_text())
    assert picture.startswith(b"\x89PNG")
    together, apart = printed.split("# %% ")[1:]
    for of_step in re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", together, flags=re.MULTILINE):
        first, second, alone = map(float, of_step)
        assert first == second == pytest.approx(alone, abs=1e-4)
    assert re.search(r"the same on both processes: True", together)
    for of_step in re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", apart, flags=re.MULTILINE):
        assert len(set(of_step)) == 3


@pytest.mark.parametrize("path", notebooks.TUTORIALS, ids=NAMES)
def test_jupytext_sees_the_same_cells(path):
    theirs = [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]
    ours = [
        ("markdown", cell.text) if cell.is_text else ("code", cell.source)
        for cell in notebooks.cells_of(path.read_text())
    ]
    assert ours == theirs


@pytest.mark.parametrize("path", notebooks.TUTORIALS, ids=NAMES)
def test_page_has_text_code_printed_lines_and_the_picture(path):
    page = notebooks.page(path)
    cells = notebooks.cells_of(path.read_text())
    assert page.startswith("# ")
    assert all((cell.text if cell.is_text else cell.source) in page for cell in cells)
    assert page.count("```text\n") == path.with_suffix(".txt").read_text().count("# %% ")
    (picture,) = re.findall(r"!\[.+\]\((.*)\)", page)
    assert (path.parent / picture).exists()


def test_the_gallery_shows_all():
    gallery = (FOLDER / "index.md").read_text()
    for name in NAMES:
        assert f"](../images/tutorial-{name}.png)]({name}.md)" in gallery
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(NAMES)


def test_nothing_is_downloaded_unless_the_reader_asks(tmp_path):
    tutorial = (FOLDER / "cora.py").read_text()
    assert "\nFOLDER = None" in tutorial
    assert "\nDOWNLOAD = False" in tutorial
    asked = tutorial.replace("\nFOLDER = None", f"\nFOLDER = {os.fspath(tmp_path)!r}")
    with pytest.raises(FileNotFoundError, match="and DOWNLOAD is False"):
        exec(compile(asked, "cora.py", "exec"), {"__name__": "cora"})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--output=docs", "is there already"),
        ("cola", "names must be of swap, cora, processes"),
    ],
)
def test_wrong_arguments(given, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["notebooks.py", given])
    with pytest.raises(SystemExit):
        notebooks.main()
    assert message in capsys.readouterr().err
