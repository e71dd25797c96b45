"""The notebooks run, on little, and the files hold the outputs that GitHub and the site show."""

import json
import re
import sys

import matplotlib
import matplotlib.pyplot as plt
import pytest
from helpers.scripts import ROOT

FOLDER = ROOT / "examples" / "notebooks"
LITTLE = {
    "see_what_a_loss_learns": {"EPOCHS": 1},
    "swap_the_loss_of_your_script": {"SIZES": [32, 64], "SECONDS": 0.01, "STEPS": 3},
}
each_notebook = pytest.mark.parametrize("name", LITTLE)


def cells_of(name, kind):
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def test_all_notebooks_are_tested():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*LITTLE}


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs(name, monkeypatch):
    """On smaller constants of the first cell, and on 200 digits. All other code is as it stands."""
    monkeypatch.chdir(FOLDER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    first, *others = ("".join(cell["source"]) for cell in cells_of(name, "code"))
    names = {"__name__": "notebook"}
    exec(compile(first, name, "exec"), names)
    assert {*LITTLE[name]} <= {*names}
    names.update(LITTLE[name])
    plt.close("all")
    with matplotlib.rc_context():
        for code in others:
            code = re.sub(r"digits\.(?:images|target)\b", r"\g<0>[:200]", code)
            exec(compile(code, name, "exec"), names)
        pictures = [cell for cell in cells_of(name, "code") if "image/png" in json.dumps(cell)]
        assert len(plt.get_fignums()) == len(pictures)
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        plt.close("all")


@each_notebook
def test_a_notebook_has_its_outputs(name):
    """After a change, `python -m docs.programs.run_notebooks` writes them."""
    cells = cells_of(name, "code")
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    for output in outputs:
        if output["output_type"] == "stream":
            assert output["name"] == "stdout"
            assert not re.search(r"(?<!\w)/\w", "".join(output["text"]))  # no file of a machine
        else:
            assert [*output["data"]] == ["image/png"]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 400_000


@each_notebook
def test_links_of_a_notebook_lead_somewhere(name):
    text = "\n".join("".join(cell["source"]) for cell in cells_of(name, "markdown"))
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for link in links:
        assert (FOLDER / link).exists(), link


@each_notebook
def test_the_site_has_a_page_of_a_notebook(name):
    page = ROOT / "docs" / f"{name}.md"
    assert page.read_text() == f"[{name}.ipynb](../examples/notebooks/{name}.ipynb)\n"
    assert re.search(rf"^{name}$", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)
