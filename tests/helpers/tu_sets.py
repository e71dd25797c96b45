"""Small sets of graphs, in the raw layout of TU."""

from pathlib import Path


def write_tu_set(folder: Path, name: str, labels: list[int], node_types: int = 0) -> None:
    """Rings, those of label 1 with a chord."""
    folder.mkdir(parents=True, exist_ok=True)
    edges, graph_of, node = [], [], 1
    for number, label in enumerate(labels, 1):
        size = 5 + label
        pairs = [(node + i, node + (i + 1) % size) for i in range(size)]
        for a, b in [*pairs, (node, node + 3)][: size + label]:
            edges += [f"{a}, {b}", f"{b}, {a}"]
        graph_of += [number] * size
        node += size
    files = {"A": edges, "graph_indicator": graph_of, "graph_labels": labels}
    if node_types:
        files["node_labels"] = [i % node_types for i in range(len(graph_of))]
    for part, lines in files.items():
        (folder / f"{name}_{part}.txt").write_text("\n".join(map(str, lines)) + "\n")
