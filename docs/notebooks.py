"""The tutorials: files in percent format, run cell by cell, and shown on the site.

    python docs/notebooks.py    # anew: docs/tutorials/*.txt and docs/images/tutorial-*.png

A tutorial is plain Python. Lines `# %%` begin a cell of code, which may have a title, and lines
`# %% [markdown]` one of text. Beside it lies what each of its cells printed when it was run last;
the site shows that, so that it can be built without the frameworks.
"""

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
TUTORIALS = [DOCS / "tutorials" / f"{name}.py" for name in ("swap", "cora", "processes")]
MARKDOWN = "[markdown]"


class Cell(NamedTuple):
    title: str
    source: str

    @property
    def is_text(self) -> bool:
        return self.title == MARKDOWN

    @property
    def text(self) -> str:
        return re.sub(r"^# ?", "", self.source, flags=re.MULTILINE)

    @property
    def draws(self) -> bool:
        return "plt.show()" in self.source


def cells_of(text: str) -> list[Cell]:
    _, *parts = re.split(r"^# %%(.*)\n", text, flags=re.MULTILINE)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [Cell(title.strip(), source.strip("\n")) for title, source in pairs]


def run(path: Path, picture: Path) -> list[str]:
    """Runs a tutorial: what each cell printed, and the picture in a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def show() -> None:
        plt.savefig(picture, dpi=110)
        plt.close()

    module = ModuleType("tutorial")
    sys.modules["tutorial"] = module  # where processes look for the functions that they are to run
    printed = []
    plt.show = show
    for number, cell in enumerate(cells_of(path.read_text())):
        output = io.StringIO()
        if not cell.is_text:
            code = compile(cell.source, f"{path.name}, cell {number}", "exec")
            with contextlib.redirect_stdout(output):
                exec(code, vars(module))
        printed.append(output.getvalue())
    return printed


def joined(printed: list[str]) -> str:
    """One text of what cells printed, with the numbers of those that did."""
    return "".join(f"# %% {i}\n{text}" for i, text in enumerate(printed) if text)


def page(path: Path) -> str:
    """A tutorial as a page in Markdown, with what it printed and drew."""
    outputs = {int(c.title): c.source for c in cells_of(path.with_suffix(".txt").read_text())}
    parts = []
    for number, cell in enumerate(cells_of(path.read_text())):
        if cell.is_text:
            parts.append(cell.text)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if number in outputs:
            parts.append(f"```text\n{outputs[number]}\n```")
        if cell.draws:
            parts.append(f"![{cell.title}](../images/tutorial-{path.stem}.png)")
    how = f"jupytext --to ipynb docs/tutorials/{path.name}"
    parts.append(f"This page is a notebook: `pip install jupytext`, then `{how}`.")
    return "\n\n".join(parts) + "\n"


def setup(app: Any) -> dict[str, bool]:
    """What Sphinx calls: shows a tutorial in place of the page beside it, which only names it."""

    def read(_: Any, name: str, source: list[str]) -> None:
        path = DOCS / f"{name}.py"
        if path in TUTORIALS:
            source[0] = page(path)
            app.env.note_dependency(str(path))
            app.env.note_dependency(str(path.with_suffix(".txt")))

    app.connect("source-read", read)
    return {"parallel_read_safe": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stems = [path.stem for path in TUTORIALS]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(stems)}; default: all")
    parser.add_argument("--output", type=Path, help="a new folder, instead of docs/")
    args = parser.parse_args()
    if unknown := set(args.names) - set(stems):
        parser.error(f"names must be of {', '.join(stems)}, but got {', '.join(sorted(unknown))}")
    if args.output is not None:
        if args.output.exists():
            parser.error(f"--output {args.output} is there already: choose another folder")
        args.output.mkdir(parents=True)
    for path in TUTORIALS:
        if path.stem in (args.names or stems):
            texts = args.output or path.parent
            images = args.output or DOCS / "images"
            printed = joined(run(path, images / f"tutorial-{path.stem}.png"))
            (texts / f"{path.stem}.txt").write_text(printed)
            print(f"{path.name}\n{printed}", flush=True)


if __name__ == "__main__":
    main()
