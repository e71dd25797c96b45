"""Graphs of which every framework makes a batch, and a batch as plain tensors."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.losses import DIM


def ring(size):
    """A graph: its number of nodes, and its edges."""
    pairs = [(node, (node + 1) % size) for node in range(size)]
    return size, both_ways(pairs)


def star(size):
    return size, both_ways([(0, leaf) for leaf in range(1, size)])


def both_ways(pairs):
    return pairs + [(target, source) for source, target in pairs]


@st.composite
def graph_lists(draw, undirected=False):
    """Graphs with self-loops, with several edges between two nodes, and without any node."""
    graphs = []
    for size in draw(st.lists(st.integers(0, 6), min_size=1, max_size=6)):
        node = st.integers(0, size - 1)
        pairs = draw(st.lists(st.tuples(node, node), max_size=8)) if size else []
        graphs.append((size, both_ways(pairs) if undirected else pairs))
    return graphs


def numbered(graphs):
    """For each graph the numbers of its nodes and edges in the batch, and its edges ``[2, E]``."""
    num_nodes = num_edges = 0
    for size, pairs in graphs:
        nodes = torch.arange(num_nodes, num_nodes + size)
        edges = torch.arange(num_edges, num_edges + len(pairs))
        yield nodes, edges, torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T.contiguous()
        num_nodes, num_edges = num_nodes + len(nodes), num_edges + len(edges)


def features_of(nodes):
    """Features ``[V, 3]`` by the number of the node; none is zero."""
    return torch.sin(torch.outer(nodes + 1.0, torch.arange(1, 4))).double()


@dataclass
class Contents:
    """A batch of G graphs with V nodes and E edges, numbered as in the first batch."""

    sizes: Tensor  # [G], nodes of each graph
    edges: Tensor  # [2, E]
    node_id: Tensor  # [V]
    edge_id: Tensor  # [E]
    features: Tensor  # [V, 3]

    @property
    def graph(self) -> Tensor:
        """Each node's graph ``[V]``."""
        return torch.repeat_interleave(self.sizes)


def layers_of():
    """What the encoders of all frameworks share."""
    return nn.ModuleList(
        nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, DIM)) for width in (3, DIM)
    )
