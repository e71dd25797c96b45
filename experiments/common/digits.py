"""The 1,797 images of handwritten digits that scikit-learn ships, as graphs."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch_geometric.data import Data

THRESHOLD = 0.2  # darker pixels are no nodes


def graphs_of_digits() -> list[Data]:
    """A graph for each image of 8 x 8 pixels, with its digit as ``y``."""
    digits = load_digits()
    return [
        graph_of(image / 16, digit)
        for image, digit in zip(digits.images, digits.target, strict=True)
    ]


def graph_of(image: np.ndarray, digit: int) -> Data:
    """A node for each bright pixel, with intensity and centred position; edges to its neighbours.

    A pixel has up to eight neighbours.
    """
    positions = np.argwhere(image > THRESHOLD)  # [V, 2]
    apart = np.abs(positions[:, None] - positions).max(2)
    features = np.column_stack(
        [image[tuple(positions.T)], (positions - positions.mean(0)) / len(image)]
    )
    return Data(
        x=torch.from_numpy(features).float(),
        edge_index=torch.from_numpy(np.argwhere(apart == 1).T),
        y=torch.tensor([digit]),
    )
