"""Tables in Markdown, which programs write into pages between markers."""

from collections.abc import Iterable, Mapping, Sequence


def markdown(head: Sequence[object], lines: Iterable[Iterable[object]]) -> str:
    """A table, from its header cells and the cells of each line."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *lines))
    return "\n".join([first, "|" + " --- |" * len(head), *others])


def fill(page: str, tables: Mapping[str, str]) -> str:
    """The page with new tables between their markers."""
    for name, table in tables.items():
        start, marker, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not end:
            raise ValueError(f"the page has no <!-- {name} -->")
        page = f"{start}{marker}{table}\n{end}{after}"
    return page
