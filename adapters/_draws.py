"""What the augmentations draw at random: plain tensors, the same for every framework.

Shapes: G graphs, V nodes and E edges in a batch. ``ptr`` ``[G + 1]`` says where each graph's nodes
begin, and where the last one's end; ``graph`` ``[V]`` is each node's graph. Both are int64, as are
the edges' end nodes.
"""

import torch
from torch import Tensor


def draw_nodes(ptr: Tensor, graph: Tensor, p: float) -> Tensor:
    """Which nodes ``[V]`` to keep: each with probability 1 - ``p``; where none would stay, one."""
    draws = torch.rand(len(graph), device=graph.device)  # [V]
    largest = draws.new_zeros(len(ptr) - 1).scatter_reduce(0, graph, draws, "amax")  # [G]
    return (draws >= p) | (draws == largest.index_select(0, graph))


def draw_connected(source: Tensor, target: Tensor, ptr: Tensor, graph: Tensor, p: float) -> Tensor:
    """Which nodes ``[V]`` to keep: a random connected subgraph of each graph, a fraction 1 - ``p``.

    The subgraph grows from a random node, which stays, by one random neighbour at a time.
    """
    sizes = ptr.diff()  # [G]
    seeds = (ptr[:-1] + _random_below(sizes))[sizes > 0]
    # If every node waits an exponential time after its first neighbour has joined, the next one to
    # join is, at any moment, a uniformly random neighbour of those: one shortest-path problem
    # gives the order for all graphs at once.
    wait = torch.empty(len(graph), dtype=torch.float32, device=graph.device).exponential_()  # [V]
    arrival = torch.full_like(wait, torch.inf).index_fill(0, seeds, 0.0)
    wait = wait.index_select(0, target)  # [E]; indexing by brackets takes twice as long
    while True:
        via_neighbours = arrival.index_select(0, source) + wait
        sooner = arrival.scatter_reduce(0, target, via_neighbours, "amin")
        if torch.equal(sooner, arrival):
            break
        arrival = sooner
    # By graph, then by arrival: floats from 0 on have the order of their bits.
    order = (graph << 32 | arrival.view(torch.int32)).argsort()
    position = torch.arange(len(graph), device=graph.device) - ptr.index_select(0, graph)
    early = position < (sizes - (p * sizes).floor()).clamp(min=1).index_select(0, graph)
    return torch.empty_like(early).scatter(0, order, early) & arrival.isfinite()


def draw_edges(
    source: Tensor, target: Tensor, ptr: Tensor, graph: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """The end nodes of the edges, a fraction ``p`` of them moved to other nodes of the same graph.

    Edges between the same two nodes move together, each in its direction. Self-loops stay.
    """
    low, high = torch.minimum(source, target), torch.maximum(source, target)
    base = max(len(graph), 1)
    pairs, pair_of_edge = torch.unique(low * base + high, return_inverse=True)  # [P], [E]
    ends = torch.stack([pairs // base, pairs % base])  # [2, P]
    graph = graph.index_select(0, ends[0])  # [P]
    size = ptr.diff().index_select(0, graph)
    first = _random_below(size)
    second = (first + 1 + _random_below(size - 1)) % size  # another one than first
    moves = (torch.rand(len(pairs), device=graph.device) < p) & (ends[0] != ends[1])
    ends = torch.where(moves, ptr.index_select(0, graph) + torch.stack([first, second]), ends)
    ends = ends.index_select(1, pair_of_edge)  # [2, E]
    source, target = torch.where(source <= target, ends, ends.flip(0))
    return source, target


def _random_below(limits: Tensor) -> Tensor:
    """For each limit a random whole number from 0 on and below it; 0 where the limit is 0."""
    return torch.randint_like(limits, 2**62) % limits.clamp(min=1)
