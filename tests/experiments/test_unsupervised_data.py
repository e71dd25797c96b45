"""Sets of graphs: what is read, known by its content, downloaded, and refused."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.tu_sets import write_tu_set

from experiments.unsupervised import data


def test_a_zip_that_may_not_be_written_beside(tmp_path):
    write_tu_set(tmp_path / "made" / "RINGS", "RINGS", [0, 1] * 10)
    root = tmp_path / "root"
    root.mkdir()
    shutil.make_archive(root / "RINGS", "zip", tmp_path / "made", "RINGS")
    root.chmod(0o500)
    graphs = data.load(data.fetch("RINGS", root, tmp_path / "cache")[0])
    assert [graph.num_nodes for graph in graphs] == [5, 6] * 10
    assert graphs[0].x.tolist() == [[1.0]] * 5


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 30, r"classes of \[30\] graphs: .* at least two classes"),
        ([0] * 20 + [1] * 9, r"classes of \[20, 9\] graphs: .* 10 graphs of each"),
    ],
)
def test_sets_that_cannot_be_evaluated(tmp_path, labels, message):
    write_tu_set(tmp_path / "RINGS", "RINGS", labels)
    with pytest.raises(ValueError, match=message):
        data.fetch("RINGS", tmp_path, tmp_path / "cache")


def test_damaged_and_missing_sets(tmp_path, monkeypatch):

    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(data.TUDataset, "download", no_network)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"NOPE cannot be downloaded \(OSError: no network\)"):
        data.fetch("NOPE", None, cache)
    with pytest.raises(ValueError, match=r"--root .* has no NOPE: neither NOPE.zip nor"):
        data.fetch("NOPE", tmp_path, cache)
    with pytest.raises(ValueError, match=r"--root .*absent is not a folder"):
        data.fetch("NOPE", tmp_path / "absent", cache)
    (tmp_path / "TORN.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"TORN\.zip is damaged"):
        data.fetch("TORN", tmp_path, cache)
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    (tmp_path / "BAD" / "BAD_graph_labels.txt").unlink()
    with pytest.raises(ValueError, match=r"BAD has no BAD_graph_labels.txt"):
        data.fetch("BAD", tmp_path, cache)
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    (tmp_path / "BAD" / "BAD_A.txt").write_text("one, two\n")
    with pytest.raises(ValueError, match=r"BAD cannot be read \(ValueError"):
        data.fetch("BAD", tmp_path, cache)
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    assert len(data.load(data.fetch("BAD", tmp_path, cache)[0])) == 20


def test_a_set_is_downloaded_once_and_whole(tmp_path, monkeypatch):
    downloads = []

    def download(dataset):
        downloads.append(dataset.name)
        write_tu_set(Path(dataset.raw_dir), dataset.name, [0, 1] * 10)
        if len(downloads) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(data.TUDataset, "download", download)
    with pytest.raises(KeyboardInterrupt):
        data.fetch("RINGS", None, tmp_path)
    once, again = (data.fetch("RINGS", None, tmp_path) for _ in range(2))
    assert once == again
    assert downloads == ["RINGS"] * 2


def test_synthetic_trees_are_balanced_and_the_same_every_time():
    first, second = data.synthetic_trees(), data.synthetic_trees()
    assert torch.cat([graph.y for graph in first]).bincount().tolist() == [80] * 6
    assert all(torch.equal(a.edge_index, b.edge_index) for a, b in zip(first, second, strict=True))
    assert not any(graph.has_isolated_nodes() or graph.has_self_loops() for graph in first)
