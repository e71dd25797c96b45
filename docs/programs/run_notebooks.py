"""Execute the notebooks of examples/notebooks, and write them with their outputs.

pip install -r requirements.txt jupyterlab
python -m docs.programs.run_notebooks  # or with the names of some of them

Pictures are reduced to a palette of 128 colours, and what Jupyter notes of the machine is left out.
"""

import base64
import io
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def smaller(picture: str) -> str:
    """A PNG in base64, with a palette."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    png = io.BytesIO()
    image.quantize(128, dither=Image.Dither.NONE).save(png, "png", optimize=True)
    return base64.b64encode(png.getvalue()).decode()


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        resources={"metadata": {"path": str(path.parent)}},
        timeout=None,
        record_timing=False,
        coalesce_streams=True,  # one output for all lines that a cell prints
    ).execute()
    notebook.metadata = METADATA
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data = {"image/png": smaller(output.data["image/png"])}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in [*map(Path, sys.argv[1:])] or sorted(NOTEBOOKS.glob("*.ipynb")):
        started = time.perf_counter()
        execute(path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s, {path.stat().st_size} bytes")
