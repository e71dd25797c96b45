"""Measures of embeddings, in cases whose values are known."""

import numpy as np
import pytest

from experiments.common import probes
from experiments.nodes.probe import linear


def blobs(centres, each, noise, seed=0):
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(centres)), each)
    return centres[labels] + noise * random.standard_normal((len(labels), centres.shape[1])), labels


def test_separate_classes_are_perfect_and_noise_is_chance():
    z, labels = blobs(np.eye(3, 6), 40, 0.05)
    values = probes.without_training(z, labels, 0) | {"probe": linear(z, labels, 0)}
    assert values.keys() == probes.NAMES.keys()
    assert all(value == pytest.approx(100) for value in values.values())
    noise, labels = blobs(np.zeros((3, 6)), 40, 1.0)
    values = probes.without_training(noise, labels, 0)
    assert -5 < values["ari"] < 5
    assert 25 < values["labels_1"] < 45
    assert 20 < linear(noise, labels, 0) < 50


def test_few_labels_are_those_of_the_nearest_mean():
    """Against a literal loop over draws, classes and samples."""
    z, labels = blobs(np.eye(3, 4), 7, 0.8)
    z, labels = z[:17], labels[:17]  # the last class has three samples
    for each in (1, 2, 3):
        random, accuracies = np.random.default_rng(4), []
        unit = [vector / np.linalg.norm(vector) for vector in z]
        for _ in range(50):
            means, test = {}, []
            for label in range(3):
                members = [i for i in range(17) if labels[i] == label]
                if len(members) <= each:
                    continue
                order = random.permutation(members)
                mean = sum(unit[i] for i in order[:each]) / each
                means[label] = mean / np.linalg.norm(mean)
                test += list(order[each:])
            nearest = [max(means, key=lambda label: unit[i] @ means[label]) for i in test]
            accuracies.append(np.mean(np.array(nearest) == labels[test]))
        assert probes.few_labels(z, labels, each, 4) == pytest.approx(100 * np.mean(accuracies))


def test_lengths_of_embeddings_make_no_difference():
    z, labels = blobs(np.eye(3, 6), 40, 0.6)
    longer = z * np.random.default_rng(1).uniform(0.1, 10, (len(z), 1))
    assert linear(longer, labels, 0) == pytest.approx(linear(z, labels, 0))
    few = [probes.few_labels(each, labels, 1, 0) for each in (longer, z)]
    assert few[0] == pytest.approx(few[1])
