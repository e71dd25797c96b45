"""Faults of the input of examples/cluster_graphs.py are errors before the first epoch."""

import csv
import os
import re

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


TWO_NAMES = "expected the names of two nodes in UTF-8, .* but it is "
NONE = "expected one edge or more, but it has none"


@pytest.mark.parametrize("option", ["--folder", "--new"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("", NONE, id="empty"),
        pytest.param("# a,b\n\n", NONE, id="comments"),
        pytest.param("source,target\n", NONE, id="header alone"),
        pytest.param("a\nb\n", f"line 1: {TWO_NAMES}'a'", id="one column"),
        pytest.param("# c\na,b\nb,c,d\n", f"line 3: {TWO_NAMES}'b,c,d'", id="ragged"),
        pytest.param("a,b\n\nb\n", f"line 3: {TWO_NAMES}'b'", id="ragged, one name"),
        pytest.param("a,b,1\n", f"line 1: {TWO_NAMES}'a,b,1'", id="weights"),
        pytest.param("a b {}\n", f"line 1: {TWO_NAMES}'a b {{}}'", id="dictionary"),
        pytest.param("a,b\nb,\n", f"line 2: {TWO_NAMES}'b,'", id="no second name"),
        pytest.param("a b\nb, c\n", f"line 2: {TWO_NAMES}'b, c'", id="two separators"),
        pytest.param("x,y;z\n", f"line 1: {TWO_NAMES}'x,y;z'", id="two separators in a line"),
        pytest.param("New York Boston\n", f"line 1: {TWO_NAMES}'New", id="spaces around spaces"),
        pytest.param("a,b\nb,c # d\n", f"line 2: {TWO_NAMES}'b,c # d'", id="comment in a line"),
        pytest.param(
            "a,b\nKöln,b\n".encode("latin-1"), rf"line 2: {TWO_NAMES}'K\\udcf6ln,b'", id="Latin-1"
        ),
        pytest.param(RING.encode("utf-16"), f"line 1: {TWO_NAMES}", id="UTF-16"),
        pytest.param(RING.encode("utf-16-le"), rf"line 1: {TWO_NAMES}'a\\x00", id="no BOM"),
        pytest.param(bytes(range(256)), f"line 1: {TWO_NAMES}", id="binary"),
        pytest.param(b"\x1f\x8b\x08\0abc,d", f"line 1: {TWO_NAMES}", id="compressed"),
        pytest.param("a" * 200_000, "field larger than field limit", id="long"),
        pytest.param(None, "Is a directory", id="sub-folder"),
    ],
)
def test_a_fault_of_a_file_is_an_error_with_file_and_line(
    content, message, option, folder, error_of, tmp_path
):
    given = [f"--folder={folder}"]
    if option == "--new":
        given.append(f"--new={tmp_path / 'new'}")
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "01.csv").write_text(RING)
    file = (tmp_path / "new" if option == "--new" else folder) / "05x.csv"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    lines = error_of(*given).splitlines()
    assert lines[-2].endswith(f"error: files of {file.parent} with a fault: 1")
    assert re.search(f"^{re.escape(str(file))}: .*{message}", lines[-1])


def test_all_faults_are_one_error(folder, error_of):
    for number in range(12):
        (folder / f"{number:02d}.csv").write_text("")
    lines = error_of(f"--folder={folder}").splitlines()
    assert lines[-11].endswith(f"files of {folder} with a fault: 12")
    assert lines[-10:] == [f"{folder / f'{number:02d}.csv'}: {NONE}" for number in range(10)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--folder=absent", "absent must be a folder of 3 files or more, but has 0"),
        ("--folder=in --new=absent", "absent must be a folder of 1 files or more, but has 0"),
        ("--new=in", "--new needs --folder"),
        ("--folder=in --clusters=50", "at most 11 clusters .* can tell 12 of 12 graphs apart"),
        ("--folder=in --clusters=12", "at most 11 clusters .* can tell 12 of 12 graphs apart"),
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


def test_a_line_that_may_be_a_header_is_an_error(folder, error_of):
    """Nodes are words, and only their place tells that all files begin with a header."""
    for file in folder.iterdir():
        file.write_text("Person A,Person B\n" + re.sub(r"(\d+)", r"node\1", file.read_text()))
    message = r"begin with \['Person A', 'Person B'\], names that no other line has"
    assert re.search(message, error_of(f"--folder={folder}"))


def clusters(tmp_path):
    with (tmp_path / "out" / "clusters.csv").open(encoding="utf-8", newline="") as file:
        return {row["graph"]: (row["cluster"], row["distance"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("\ufeff" + RING, id="BOM"),
        pytest.param("source,target\n" + RING, id="header"),
        pytest.param("# made by hand\n\nSource;Target\n" + RING.replace(",", ";"), id="Gephi"),
        pytest.param('\ufeff"from","to"\n"a","b"\n"b","c"\n"c","d"\n"d","a"\n', id="quotes of R"),
        pytest.param("id_1,id_2\n0,1\n1,2\n2,3\n3,0\n", id="words above numbers"),
        pytest.param(RING.replace(",", ";"), id="semicolons"),
        pytest.param(RING.replace(",", " \t "), id="tabs"),
        pytest.param(RING.replace(",", "   "), id="spaces"),
        pytest.param(RING.replace("\n", "\r\n"), id="Windows"),
        pytest.param(RING.replace("\n", "\r"), id="old Mac"),
        pytest.param(RING.replace("a", "New York").replace("c", "New Delhi"), id="names"),
        pytest.param(RING.replace("a", '"York, New"').replace("c", '"York; New"'), id="quotes"),
        pytest.param(RING.replace("a", "Köln").replace("c", "C#"), id="letters"),
        pytest.param(RING + "b,a\na,b\n", id="repeated"),
    ],
)
def test_each_notation_of_a_ring_is_the_same_graph(content, folder, call, tmp_path):
    """Also for an added graph, whose distance to its centre shows each difference."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "other.csv").write_bytes(content.encode())
    (tmp_path / "new" / "plain.csv").write_text(RING)
    printed = call(f"--folder={folder}", f"--new={tmp_path / 'new'}")
    read = clusters(tmp_path)
    assert len(read) == 14
    assert read["other.csv"] == read["plain.csv"]
    has_header = re.search("source|from|id_1", content, re.I)
    assert ("skipped the header of 1 files, such as [" in printed) == bool(has_header)


def test_an_edge_that_could_be_a_header_stays(folder, call, tmp_path):
    """The words are nodes of other edges, or the file has no others."""
    (tmp_path / "new").mkdir()
    for name, text in {
        "0": "from,to\nto,a\n",
        "1": "b,c\nc,a\n",
        "2": "x,y\n",
        "3": "b,c\n",
    }.items():
        (tmp_path / "new" / name).write_text(text)
    assert "header" not in call(f"--folder={folder}", f"--new={tmp_path / 'new'}")
    read = clusters(tmp_path)
    assert read["0"] == read["1"] != read["2"] == read["3"]


def test_a_last_batch_of_one_small_graph(tmp_path, call):
    """Of 129 graphs one is alone in its batch, where NodeDrop may leave a single node."""
    (tmp_path / "in").mkdir()
    for number in range(129):
        (tmp_path / "in" / f"{number}").write_text(edges_of(nx.path_graph(2 + number % 2)))
    call(f"--folder={tmp_path / 'in'}", "--epochs=10")
    assert len(clusters(tmp_path)) == 129


def test_names_of_files_need_not_be_text(folder, call, tmp_path):
    name = os.fsencode(folder) + b"/\xff"
    with open(name, "w") as file:
        file.write(RING)
    call(f"--folder={folder}")
    assert b"\n\xff,True," in (tmp_path / "out" / "clusters.csv").read_bytes()


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
