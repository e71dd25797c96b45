"""What is reported is of the right graphs: modes, folds, halves, and which half chooses.

The sets are made so that each wrong choice of graphs is a wrong number.
"""

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.metrics.pairwise import rbf_kernel
from torch_geometric.data import Batch, Data

from experiments.clusters import study as clusters
from experiments.common import graphs
from experiments.common.digits import graphs_of_digits
from experiments.false_negatives import study as false_negatives
from experiments.few_labels import study as few_labels
from experiments.nodes import probe
from experiments.nodes.probe import linear
from experiments.tu_sets import evaluate
from experiments.warm_up import study as warm_up

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


def test_molecules_choose_the_strength_on_the_validation_part(monkeypatch):
    """The larger C the better on the validation part, and the worse on the test part."""
    pytest.importorskip("rdkit")
    from experiments.molecules import data, finetune
    from experiments.molecules import probe as molecules

    assert finetune.at_best_epoch({"valid": [1.0, 3.0, 2.0], "test": [5.0, 6.0, 7.0]}) == 6
    parts = np.arange(30) % 3
    labels = torch.from_numpy(np.arange(30) // 3 % 2).float().unsqueeze(1)
    made = data.LabelledSet([Data()] * 30, labels, parts, "")
    z = torch.zeros(30, molecules.WIDTH)
    z[torch.arange(30), torch.from_numpy(parts)] = 1  # column: the part
    monkeypatch.setattr(molecules, "labelled", lambda table: made)
    monkeypatch.setattr(molecules, "outputs", lambda encoder, graphs: z)

    def fitted(z, labels, strength=1.0):
        assert (z.argmax(1) == data.TRAIN).all()
        return strength

    def score(probes, z, labels):
        (part,) = set(z.argmax(1).tolist())
        return {data.VALID: probes[0], data.TEST: -probes[0]}[part]

    monkeypatch.setattr(molecules, "fitted", fitted)
    monkeypatch.setattr(molecules, "score", score)
    config = molecules.SETTING | {"seed": 0, "few": [], "strengths": [1.0, 9.0, 3.0]}
    assert molecules.run(config, None, None, "cpu")["auc"] == {"all": -9.0}


class BetterOnValidation:
    """A probe of nodes: the larger C the better on 10 % of the nodes, and the worse on 80 %."""

    def __init__(self, C, max_iter):  # scikit-learn's name
        self.strength, self.seen = C, []

    def fit(self, z, labels):
        assert len(z) == len(labels) == 20
        assert {*np.bincount(labels)} == {10}
        self.trained = {*z[:, 0].tolist()}
        self.splits.append(self.trained)
        return self

    def score(self, z, labels):
        nodes = {*z[:, 0].tolist()}
        assert not nodes & self.trained
        return {20: self.strength, 160: -self.strength}[len(nodes)]


def test_the_probe_of_nodes_trains_on_a_tenth_and_chooses_on_another(monkeypatch):
    splits = []
    monkeypatch.setattr(BetterOnValidation, "splits", splits, raising=False)
    monkeypatch.setattr(probe, "LogisticRegression", BetterOnValidation)
    z, labels = np.arange(200.0)[:, None], np.arange(200) % 2
    for seed in (0, 1, 1):
        assert linear(z, labels, seed) == pytest.approx(-100 * max(probe.STRENGTHS))
    number = len(probe.STRENGTHS)
    of_splits = [frozenset(trained) for trained in splits[::number]]
    assert all(splits[i] == splits[i // number * number] for i in range(len(splits)))
    first, second, again = of_splits[:5], of_splits[5:10], of_splits[10:]
    assert len({*first, *second}) == 10
    assert second == again


class BetterInside(BaseEstimator):
    """An SVM: the larger C the better within a training fold, and the worse on its test fold.

    The kernel has the numbers of its row and column, i * 1000 + j.
    """

    def __init__(self, C=1.0, kernel="", cache_size=0):  # scikit-learn's name
        self.C, self.kernel, self.cache_size = C, kernel, cache_size

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.pairwise = True  # a kernel
        return tags

    def fit(self, kernel, labels):
        self.classes_ = np.unique(labels)
        rows, columns = kernel[:, 0] // 1000, kernel[0] % 1000
        assert rows.tolist() == columns.tolist()
        return self

    def score(self, kernel, labels):
        rows, columns = ({*of.tolist()} for of in (kernel[:, 0] // 1000, kernel[0] % 1000))
        assert not rows & columns
        return np.log10(self.C) * (-1 if len(rows | columns) == 100 else 1)


def test_the_svm_chooses_its_strength_within_the_training_folds(monkeypatch):
    monkeypatch.setattr(evaluate, "SVC", BetterInside)
    kernel = np.add.outer(1000.0 * np.arange(100), np.arange(100))
    found = evaluate.of_kernel(kernel, np.arange(100) % 2, seed=0)
    assert found == pytest.approx(-100 * np.log10(max(evaluate.PENALTIES)))


def one_shot(encoder, some, half, standardised, each, seed):
    """Nearest class mean with so many labels per class, graph by graph, from the encoder alone."""
    encoder.eval()
    with torch.no_grad():
        z = torch.cat([encoder(Batch.from_data_list([graph])) for graph in some]).double().numpy()
    if standardised:
        z = (z - z.mean(0)) / z.std(0)
    z, labels = z[half], np.array([int(some[i].y) for i in half])
    z = z / np.sqrt((z**2).sum(1, keepdims=True))
    random, accuracies = np.random.default_rng(seed), []
    for _ in range(100):
        means, test = [], []
        for label in sorted({*labels}):
            order = random.permutation([i for i in range(len(z)) if labels[i] == label])
            mean = sum(z[i] for i in order[:each])
            means.append(mean / np.sqrt((mean**2).sum()))
            test += [(i, label) for i in order[each:]]
        right = [
            sorted({*labels})[int(np.argmax([z[i] @ mean for mean in means]))] == label
            for i, label in test
        ]
        accuracies.append(sum(right) / len(right))
    return 100 * sum(accuracies) / len(accuracies)


@pytest.mark.parametrize("name", ["digits", "MSRC_9"])
def test_what_is_reported_is_of_the_encoder_alone(monkeypatch, name):
    """Embeddings before the head, standardised where the set says so, with as many labels."""
    some = graphs_of_digits()[:150]
    labels = np.array([int(graph.y) for graph in some])
    made, standardised = [], name == "MSRC_9"
    for number, graph in enumerate(some):
        graph.number = number
    for study in (few_labels, false_negatives):
        monkeypatch.setattr(study, "graphs_of", lambda file: some)
        trained = study.trained
        monkeypatch.setattr(
            study,
            "trained",
            lambda *given, trained=trained: made.append(trained(*given)) or made[0],
        )
        monkeypatch.setattr(study, "MEASURES", ["labels_1", "labels_5"])
    monkeypatch.setattr(warm_up, "graphs_of", lambda name, file: some)
    model_of = warm_up.ContrastiveModel
    monkeypatch.setattr(
        warm_up, "ContrastiveModel", lambda *given: made.append(model_of(*given)) or made[0]
    )
    monkeypatch.setattr(warm_up, "SETS", {name: warm_up.SETS[name]._replace(epochs=2)})
    short = {"seed": 3, "epochs": 2}
    rows = (
        (few_labels, few_labels.config_of(name, graphs.INFO_NCE, temperature=0.5)),
        (false_negatives, false_negatives.config_of(name, false_negatives.SUPCON, 0.5, "half")),
        (warm_up, warm_up.warm_up(name, warm_up.K_MEANS, 20)),
    )
    for study, config in rows:
        made.clear()
        found = study.run(config | short, None)
        for part, half in zip(("development", "held_out"), study.halves(labels), strict=True):
            for each in (1, 5):
                of_loop = one_shot(made[0].encoder.encoder, some, half, standardised, each, 3)
                assert found[part][f"labels_{each}"] == pytest.approx(of_loop, abs=0.01)
