"""Molecules on disk: featurised once, read as PyG makes them, and a stop loses nothing."""

import gzip
import itertools
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch_geometric.utils import coalesce
from torch_geometric.utils.smiles import from_smiles

from experiments.common import results
from experiments.transfer import molecules
from experiments.transfer.smiles import lines, synthetic


@pytest.fixture
def store():
    """The molecules of a file, featurised here."""

    def call(source, column, cache):
        with ThreadPoolExecutor(1) as pool:
            return molecules.store(source, column, cache, pool)

    return call


ODD = ["CCO", "no molecule", "c1ccccc1O", "[Na+].[Cl-]", "", "C[C@H](N)C(=O)O", "*CC", "C/C=C/C"]
ODD += ["C" * length for length in range(1, 13)]  # a tenth is odd


def same_graph(one, other):
    ends, carried = zip(*(coalesce(g.edge_index, g.edge_attr) for g in (one, other)), strict=True)
    return torch.equal(one.x, other.x) and torch.equal(*ends) and torch.equal(*carried)


@pytest.mark.parametrize("suffix", [".smi", ".txt.gz", ".csv", ".csv.gz"])
def test_molecules_come_back_as_pyg_makes_them(store, tmp_path, suffix):
    source = tmp_path / f"some{suffix}"
    if "csv" in suffix:
        text = "\n".join(["name,smiles", *(f"x,{smiles}" for smiles in ODD)])
    else:
        text = "\n".join(f"{smiles} x" if smiles else "" for smiles in ODD)
    source.write_bytes(gzip.compress(text.encode()) if "gz" in suffix else text.encode())
    stored = store(source, None, tmp_path)
    assert stored.lines.tolist() == [0, 2, 3, *range(5, 20)]
    for graph, line in zip(stored, stored.lines, strict=True):
        assert same_graph(graph, from_smiles(ODD[line]))


@pytest.mark.parametrize(("name", "line"), [("some.smi", 6), ("some.csv", 7)])
def test_more_than_a_tenth_that_is_no_molecule_is_an_error(store, tmp_path, name, line):
    source = tmp_path / name
    smiles = ["C" * length for length in range(1, 101)]
    for bad in range(5, 203, 2):
        smiles.insert(bad, "X-ray")
    assert smiles.count("X-ray") == 99
    source.write_text("\n".join(["smiles"] * name.endswith("csv") + smiles))
    message = (
        rf"{name}: 99 of its 199 lines \(50%\) are not molecules, the first on line {line}: 'X-"
    )
    for _ in range(2):  # also when they have been featurised
        with pytest.raises(ValueError, match=message):
            store(source, None, tmp_path)


def test_bad_lines_at_the_end_are_found(store, tmp_path):
    source = tmp_path / "some.smi"
    source.write_text("C\nCC\n\n\n")
    with pytest.raises(ValueError, match=r"2 of its 4 lines \(50%\) .* first on line 3: ''"):
        store(source, None, tmp_path)


def test_an_interrupted_featurisation_goes_on(store, tmp_path, monkeypatch):
    monkeypatch.setattr(molecules, "CHUNK", 10)
    monkeypatch.setattr(molecules, "AHEAD", 2)
    source = tmp_path / "synthetic.smi"
    smiles = synthetic()[0][:95]
    source.write_text("\n".join(smiles))

    def breaks(*given):
        yield from itertools.islice(lines(*given), 70)
        raise KeyboardInterrupt

    monkeypatch.setattr(molecules, "lines", breaks)
    with pytest.raises(KeyboardInterrupt):
        store(source, None, tmp_path)
    monkeypatch.setattr(molecules, "lines", lines)
    (folder,) = tmp_path.glob("synthetic.smi-*")
    with (folder / "atoms").open("ab") as file:
        file.write(b"torn")  # as by a kill in the middle of a chunk
    featurised = []
    graph_of = molecules.graph_of
    monkeypatch.setattr(molecules, "graph_of", lambda s: featurised.append(s) or graph_of(s))
    stored = store(source, None, tmp_path)
    assert featurised == smiles[50:]  # two chunks were ahead of what was safe on disk
    assert len(stored) == 95
    assert all(same_graph(g, from_smiles(s)) for g, s in zip(stored, smiles, strict=True))
    store(source, None, tmp_path)
    assert featurised == smiles[50:]  # whole: nothing is done again
    again = tmp_path / "moved.smi"
    again.write_bytes(source.read_bytes())
    assert store(again, None, tmp_path).digest == stored.digest  # of what it has, all of it
    source.write_text("C\nCC\n")
    assert len(store(source, None, tmp_path)) == 2  # another file
    source.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"synthetic.smi: none of its 1 lines is a molecule"):
        store(source, None, tmp_path)


def test_a_killed_process_keeps_what_is_featurised(tmp_path, monkeypatch):
    monkeypatch.setattr(molecules, "CHUNK", 10)
    monkeypatch.setattr(molecules, "AHEAD", 0)
    source = tmp_path / "synthetic.smi"
    source.write_text("\n".join(synthetic()[0][:95]))

    def stop():
        def kills(*given):
            for number, line in enumerate(lines(*given)):
                if number == 30:
                    pool.submit(signal.raise_signal, signal.SIGKILL)
                yield line

        monkeypatch.setattr(molecules, "lines", kills)
        with results.processes(1, tmp_path) as pool:
            molecules.store(source, None, tmp_path, pool)

    with pytest.raises(results.Stopped, match=f"killed.*: stopped; .* is kept in {tmp_path}"):
        stop()
    (progress,) = tmp_path.glob("synthetic.smi-*/progress.json")
    assert json.loads(progress.read_text())["lines"] == 30


def test_each_column_has_its_own_molecules(store, tmp_path):
    source = tmp_path / "two.csv"
    source.write_text("salt,smiles\n[Na+].[Cl-],C\n[K+].[Br-],CC\n")
    sizes = [
        [graph.num_nodes for graph in store(source, column, tmp_path)]
        for column in ("salt", "smiles", None)
    ]
    assert sizes == [[2, 2], [1, 2], [1, 2]]


def test_a_file_is_known_by_its_content(store, tmp_path):
    """Not by its name, size and age, which another file may have too."""
    source = tmp_path / "some.smi"
    source.write_text("CC\nCCC\n")
    state = source.stat()
    assert [graph.num_nodes for graph in store(source, None, tmp_path)] == [2, 3]
    source.write_text("CCC\nCC\n")
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert [graph.num_nodes for graph in store(source, None, tmp_path)] == [3, 2]
    with pytest.raises(ValueError, match=r"absent.smi is not a file"):
        store(tmp_path / "absent.smi", None, tmp_path)


def test_a_file_of_someone_else_stays(tmp_path):
    mine = tmp_path / "synthetic.smi"
    mine.write_text("CCO\n")
    with pytest.raises(ValueError, match=r"synthetic.smi exists and has other content"):
        molecules.write_once(mine, "CC\n")
    assert mine.read_text() == "CCO\n"


def test_two_processes_featurise_once(store, tmp_path):
    source = tmp_path / "synthetic.smi"
    smiles = synthetic()[0][:200]
    source.write_text("\n".join(smiles))
    with ThreadPoolExecutor(2) as pool:
        stored = [pool.submit(store, source, None, tmp_path) for _ in range(2)]
        assert [len(future.result()) for future in stored] == [200, 200]


def test_damaged_files_are_named(tmp_path):
    torn = tmp_path / "torn.smi.gz"
    torn.write_bytes(gzip.compress(b"C\n" * 10000)[:-30])
    with pytest.raises(ValueError, match=r"torn.smi.gz cannot be read: "):
        list(lines(torn))
    (tmp_path / "bom.CSV").write_text("\ufeffsmiles\nCCO\n", encoding="utf-8")
    assert list(lines(tmp_path / "bom.CSV")) == ["CCO"]


def test_only_so_much_of_a_file_is_read_ahead(monkeypatch):
    monkeypatch.setattr(molecules, "CHUNK", 10)
    monkeypatch.setattr(molecules, "AHEAD", 2)
    read = []
    endless = (read.append(1) or "C" for _ in iter(int, 1))
    with ThreadPoolExecutor(1) as pool:
        chunks = molecules.in_order(pool, endless, 0)
        for _ in range(5):
            next(chunks)
    assert len(read) <= 10 * (5 + 2)
