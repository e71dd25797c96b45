"""What rows are good for, measured: against cases whose answer is known."""

import numpy as np
import pytest

from experiments.nodes.probe import linear
from experiments.common import probes


def blobs(centres, each, noise, seed=0):
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(centres)), each)
    return centres[labels] + noise * random.standard_normal((len(labels), centres.shape[1])), labels


def test_classes_far_apart_are_found_by_all_and_noise_by_none():
    rows, labels = blobs(np.eye(3, 6), 40, 0.05)
    found = probes.without_training(rows, labels, 0) | {"probe": linear(rows, labels, 0)}
    assert found.keys() == probes.NAMES.keys()
    assert all(value == pytest.approx(100) for value in found.values())
    noise, labels = blobs(np.zeros((3, 6)), 40, 1.0)
    found = probes.without_training(noise, labels, 0)
    assert -5 < found["ari"] < 5
    assert 25 < found["labels_1"] < 45
    assert 20 < linear(noise, labels, 0) < 50


def test_few_labels_are_those_of_the_nearest_mean():
    """Against a literal loop over draws, classes and rows."""
    rows, labels = blobs(np.eye(3, 4), 7, 0.8)
    rows, labels = rows[:17], labels[:17]  # the last class has three rows
    for each in (1, 2, 3):
        random, accuracies = np.random.default_rng(4), []
        unit = [row / np.linalg.norm(row) for row in rows]
        for _ in range(50):
            means, asked = {}, []
            for label in range(3):
                members = [i for i in range(17) if labels[i] == label]
                if len(members) <= each:
                    continue
                order = random.permutation(members)
                mean = sum(unit[i] for i in order[:each]) / each
                means[label] = mean / np.linalg.norm(mean)
                asked += list(order[each:])
            nearest = [max(means, key=lambda label: unit[i] @ means[label]) for i in asked]
            accuracies.append(np.mean(np.array(nearest) == labels[asked]))
        assert probes.few_labels(rows, labels, each, 4) == pytest.approx(100 * np.mean(accuracies))


def test_length_of_rows_makes_no_difference():
    rows, labels = blobs(np.eye(3, 6), 40, 0.6)
    longer = rows * np.random.default_rng(1).uniform(0.1, 10, (len(rows), 1))
    assert linear(longer, labels, 0) == pytest.approx(linear(rows, labels, 0))
    few = [probes.few_labels(some, labels, 1, 0) for some in (longer, rows)]
    assert few[0] == pytest.approx(few[1])
