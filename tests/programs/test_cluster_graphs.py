"""Faults of the input of examples/cluster_graphs.py are errors before the first epoch."""

import csv
import os
import re
from pathlib import Path

import matplotlib.pyplot as plt
import networkx as nx
import pytest
import torch
from helpers.scripts import script_here
from matplotlib.figure import Figure

RING = "a,b\nb,c\nc,d\nd,a\n"
PATH = "a,b\nb,c\nc,d\n"


def edges_of(network):
    return "".join(f"{a},{b}\n" for a, b in network.edges)


@pytest.fixture
def folder(tmp_path):
    """Stars and rings of 4 to 9 nodes, each in a file, where the tests add theirs."""
    (tmp_path / "in").mkdir()
    for number, f in enumerate([nx.cycle_graph, nx.star_graph] * 6):
        (tmp_path / "in" / f"{number:02d}.csv").write_text(edges_of(f(4 + number // 2)))
    return tmp_path / "in"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Runs the example with one epoch, and returns what it prints."""

    def run(*arguments):
        given = f"--output={tmp_path / 'out'}", "--restarts=1", "--epochs=1", *arguments
        script_here(monkeypatch, "examples/cluster_graphs.py", *given)
        return capsys.readouterr().out

    yield run
    plt.close("all")


@pytest.fixture
def error_of(tmp_path, monkeypatch, capsys, call):
    """The message of an error before the first epoch, which leaves the folder as it was."""

    def run(*arguments):
        def adam(*_, **__):
            raise AssertionError("the training begins")

        monkeypatch.setattr(torch.optim, "Adam", adam)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit, match=r"^2$"):
            call(*arguments)
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("content", "got"),
    [
        pytest.param("", "has no edge", id="empty"),
        pytest.param("# a,b\n\n", "no edge", id="comments"),
        pytest.param("a\nb\n", "'a'", id="one name"),
        pytest.param("# c\na,b\nb,\n", "'b,'", id="no second name"),
        pytest.param("a,,b\n", "'a,,b'", id="an empty column"),
        pytest.param("a,b,1\n", "'a,b,1'", id="weights"),
        pytest.param("a b {}\n", "'a b {}'", id="dictionary"),
        pytest.param("New York,Boston\n", "'New York,Boston'", id="spaces in a name"),
        pytest.param("a,b\nb,c # d\n", "'b,c # d'", id="comment in a line"),
        pytest.param("a,b\nKöln,b\n".encode("latin-1"), "can't decode byte 0xf6", id="Latin-1"),
        pytest.param(RING.encode("utf-16"), "can't decode byte 0x", id="UTF-16"),
        pytest.param(None, "Is a directory", id="sub-folder"),
    ],
)
def test_a_fault_of_a_file_is_an_error_with_its_name(content, got, folder, error_of):
    file = folder / "05x.csv"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert re.search(
        f"error: {re.escape(str(file))} must .* but .*{got}", error_of(f"--folder={folder}")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--folder=absent", "absent must be a folder of 3 files or more, but has 0"),
        ("--folder=in --new=absent", "absent must be a folder of 1 files or more, but has 0"),
        ("--folder=in --new=faulty", "faulty/00.csv must have two names in each line"),
        ("--new=in", "--new needs --folder"),
        ("--folder=in --clusters=50", "at most 11 clusters .* there are 12 graphs"),
        ("--folder=in --clusters=12", "at most 11 clusters .* there are 12 graphs"),
        ("--folder=in --output=in/out", "--output in/out must be outside of in, which has the gr"),
        ("--folder=in --new=new --output=new/out", "new/out must be outside of new, which has"),
        ("--folder=in --output=in", "--output must be a new folder .* exists"),
        ("--folder=in --output=link", "--output must be a new folder .* exists"),
        ("--folder=in --output=absent/out", "--output must be a new folder .* No such file"),
        ("--folder=in --output=in/00.csv/out", "--output must be a new folder .* Not a directory"),
        (f"--folder=in --output={'a' * 300}", "--output must be a new folder .* too long"),
    ],
)
def test_what_cannot_be_done_is_an_error(given, message, folder, error_of, monkeypatch):
    monkeypatch.chdir(folder.parent)
    os.symlink("nowhere", "link")
    os.mkdir("new")
    os.mkdir("faulty")
    Path("faulty/00.csv").write_text("a,b,1")
    assert re.search(message, error_of(*given.split()).splitlines()[-1])


@pytest.mark.parametrize(("given", "most"), [([], 1), (["--clusters=3"], 2)])
def test_equal_graphs_are_no_clusters_of_their_own(given, most, tmp_path, error_of):
    """Without --clusters, all graphs are one ring; else they are rings and paths."""
    (tmp_path / "in").mkdir()
    for number in range(12):
        text = PATH if most == 2 and number % 2 else RING
        (tmp_path / "in" / f"{number}.csv").write_text(text)
    message = f"at most {most} clusters are possible, because the encoder can tell {most} of 12 "
    assert message in error_of(f"--folder={tmp_path / 'in'}", *given)


def clusters(tmp_path):
    with (tmp_path / "out" / "clusters.csv").open(encoding="utf-8", newline="") as file:
        return {row["graph"]: (row["cluster"], row["distance"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("\ufeff" + RING, id="BOM"),
        pytest.param("# made by hand\n\n" + RING, id="comment"),
        pytest.param(RING.replace(",", " \t "), id="tabs"),
        pytest.param(RING.replace(",", "   "), id="spaces"),
        pytest.param(RING.replace("\n", "\r\n"), id="Windows"),
        pytest.param(RING.replace("a", "Köln").replace("c", "C#"), id="letters"),
        pytest.param(RING + "b,a\na,b\n", id="repeated"),
    ],
)
def test_each_notation_of_a_ring_is_the_same_graph(content, folder, call, tmp_path):
    """Also for an added graph, whose distance to its centre shows each difference."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "other.csv").write_bytes(content.encode())
    (tmp_path / "new" / "plain.csv").write_text(RING)
    call(f"--folder={folder}", f"--new={tmp_path / 'new'}")
    read = clusters(tmp_path)
    assert len(read) == 14
    assert read["other.csv"] == read["plain.csv"]


def test_a_last_batch_of_one_small_graph(tmp_path, call):
    """Of 129 graphs one is alone in its batch, where NodeDrop may leave a single node."""
    (tmp_path / "in").mkdir()
    for number in range(129):
        (tmp_path / "in" / f"{number}").write_text(edges_of(nx.path_graph(2 + number % 2)))
    call(f"--folder={tmp_path / 'in'}", "--epochs=10")
    assert len(clusters(tmp_path)) == 129


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_results_are_written_whole_or_not_at_all(error, folder, call, tmp_path, monkeypatch):
    def fail(*_, **__):
        assert len([*tmp_path.glob("unfinished_*/results/clusters.csv")]) == 1
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", fail)
        with pytest.raises(type(error)):
            call(f"--folder={folder}")
    assert [*tmp_path.iterdir()] == [folder]
    call(f"--folder={folder}")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "clusters.csv",
        "clusters.png",
    ]


def test_a_folder_made_during_the_training_stays(folder, call, tmp_path, monkeypatch):
    adam = torch.optim.Adam

    def make_folder(*given, **options):
        (tmp_path / "out").mkdir()
        return adam(*given, **options)

    monkeypatch.setattr(torch.optim, "Adam", make_folder)
    assert f"are in {tmp_path / 'out_new'}\n" in call(f"--folder={folder}")
    assert [*(tmp_path / "out").iterdir()] == []
    assert len([*(tmp_path / "out_new").iterdir()]) == 2
