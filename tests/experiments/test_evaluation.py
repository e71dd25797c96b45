"""What is reported is of the right graphs: modes, folds, halves, and which half chooses.

The sets are made so that each wrong choice of graphs is a wrong number.
"""

import numpy as np
import pytest
import torch
from sklearn.metrics.pairwise import rbf_kernel
from torch_geometric.data import Data

from experiments.clusters import study as clusters
from experiments.common import graphs
from experiments.common.digits import graphs_of_digits
from experiments.false_negatives import study as false_negatives
from experiments.few_labels import study as few_labels
from experiments.nodes.probe import linear
from experiments.tu_sets import evaluate

HALVES = np.arange(40), np.arange(40, 80)


@pytest.fixture
def planted(monkeypatch):
    """Two kinds of graphs, whose labels are right on the held-out half and random on the other."""
    random = np.random.default_rng(0)
    kinds = np.arange(80) % 2
    labels = np.concatenate([random.permutation(kinds[:40]), kinds[40:]])
    made = []
    for kind, label in zip(kinds, labels, strict=True):
        x = torch.eye(3)[[kind] * (4 + 3 * kind)] + 0.1 * torch.from_numpy(random.normal(size=3))
        path = torch.arange(len(x) - 1)
        edges = torch.stack([path, path + 1])
        edges = torch.cat([edges, edges.flip(0)], 1)
        made.append(Data(x=x.float(), edge_index=edges, y=torch.tensor([label])))
    for study in (few_labels, clusters, false_negatives):
        monkeypatch.setattr(study, "graphs_of", lambda file: made)
        monkeypatch.setattr(study, "halves", lambda labels: HALVES)


def test_the_embedding_of_a_graph_does_not_depend_on_other_graphs():
    some, encoder = graphs_of_digits()[:9], graphs.GIN(3)
    together = graphs.embed(encoder.train(), some)
    np.testing.assert_allclose(graphs.embed(encoder.train(), some[:1]), together[:1], rtol=1e-4)


@pytest.mark.usefixtures("planted")
def test_runs_name_their_halves():
    config = {"seed": 0, "row": graphs.UNTRAINED}
    with_few = few_labels.run(config | {"set": "digits"}, None)
    masked = false_negatives.config_of("digits", graphs.UNTRAINED, 1.0, "half")
    for run in (with_few, false_negatives.run(masked | {"seed": 0}, None)):
        assert run["development"]["labels_1"] < 70 < 95 < run["held_out"]["labels_1"]
    of_spaces = clusters.run(config, None, choose_in=["embeddings"])["clusters"]
    for found in of_spaces.values():
        assert found["development"]["nmi"] < 20 < 90 < found["held_out"]["nmi"]
    assert of_spaces["embeddings"]["chosen"]["nmi"] > 50


def test_classifiers_do_not_know_labels_that_are_random():
    """Unless they are scored on the labels that they were trained with."""
    random = np.random.default_rng(0)
    z, labels = random.normal(size=(200, 60)), np.arange(200) % 2
    shuffled = random.permutation(labels)
    assert evaluate.of_kernel(rbf_kernel(z), shuffled, seed=0) < 65
    assert linear(z, shuffled, seed=0) < 65
    of_classes = (labels[:, None] == labels).astype(float)
    assert evaluate.of_kernel(of_classes, labels, seed=0) == linear(of_classes, labels, 0) == 100


def opposite(config, seeds, choosing):
    """The hotter the better, on the development half of the choosing seeds alone."""
    for seed in seeds:
        tau = config.get("temperature", 0) * (1 if seed in choosing else -1)
        halves = {"development": {"labels_1": tau}, "held_out": {"labels_1": -tau}}
        yield {"config": config | {"seed": seed}, **halves}


def test_settings_are_chosen_by_the_development_half_of_the_choosing_seeds():
    study = false_negatives
    seeds = study.CHOOSING_SEEDS[0], study.SEEDS[0], study.SEEDS[1]
    configs = study.choosing_trainings("digits")
    runs = [r for c in configs for r in opposite(c, seeds, study.CHOOSING_SEEDS)]
    tuned = study.tuned("digits", runs)
    assert {config["temperature"] for config in tuned.values()} == {
        max(study.SETS["digits"].second)
    }
    study = few_labels
    seeds = study.CHOOSING_SEEDS[0], *study.SETS["digits"].seeds[:2]
    configs = study.choosing("digits")
    runs = [r for c in configs for r in opposite(c, seeds, study.CHOOSING_SEEDS)]
    rows = study.rows("digits", runs)
    best = [config["temperature"] for row, config in rows.items() if study.AT_BEST in row]
    assert best == [max(study.TEMPERATURES), max(study.OF_PGCL), max(study.TEMPERATURES)]


def test_molecules_are_tuned_with_the_parts_in_their_order(monkeypatch):
    """What is learned is right on the validation part, and wrong on the test part."""
    pytest.importorskip("rdkit")
    from experiments.molecules import data, finetune

    carbons = [data.graph_of("C" * n) for n in range(2, 12)]
    oxygens = [data.graph_of("O" * n) for n in range(2, 12)]
    made, labels, parts = [], [], []
    for part, turned in enumerate((False, False, True)):
        for graph, has_oxygen in [*((g, 0) for g in carbons), *((g, 1) for g in oxygens)]:
            label = torch.tensor([[float(has_oxygen != turned)]])
            made.append(Data(**{**graph.to_dict(), "y": label}))
            labels.append(label[0])
            parts.append(part)
    molecules = data.LabelledSet(made, torch.stack(labels), np.array(parts), "")
    monkeypatch.setattr(finetune, "labelled", lambda table: molecules)
    config = {"seed": 0, "dropout": 0.0, "epochs": 10, "batch_size": 10, "lr": 1e-3}
    auc = finetune.run(config, None, None, "cpu")["auc"]
    assert auc["test"][-1] < 10 < 90 < auc["valid"][-1]
