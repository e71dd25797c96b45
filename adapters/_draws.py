"""The random draws of the augmentations, on plain tensors, so that all frameworks share them.

A batch has G graphs, V nodes and E edges. The functions describe it by four int64 tensors:

- ``sizes`` ``[G]``: the number of nodes of each graph;
- ``graph`` ``[V]``: the graph of each node, in ascending order;
- ``source`` and ``target`` ``[E]``: the two end nodes of each edge.
"""

import torch
from torch import Tensor


def draw_nodes(sizes: Tensor, graph: Tensor, p: float) -> Tensor:
    """Draw the mask ``[V]`` of nodes to keep, each node with probability 1 - ``p``.

    If a graph would lose all its nodes, it keeps one of them, chosen uniformly at random.
    """
    draws = torch.rand(len(graph), device=graph.device)  # [V]
    largest = draws.new_zeros(len(sizes)).scatter_reduce(0, graph, draws, "amax")  # [G]
    return (draws >= p) | (draws == largest.index_select(0, graph))


def draw_connected(
    sizes: Tensor, graph: Tensor, source: Tensor, target: Tensor, p: float
) -> Tensor:
    """Draw a random connected subgraph of each graph, and return the mask ``[V]`` of its nodes.

    The subgraph keeps a fraction 1 - ``p`` of the graph's nodes. It starts from a random node and
    grows by one random neighbour at a time.
    """
    starts = sizes.cumsum(0) - sizes  # [G], the first node of each graph
    first_nodes = (starts + _random_below(sizes))[sizes > 0]
    # Every node draws an exponential waiting time, which begins when the first of its neighbours
    # joins the subgraph. The exponential distribution has no memory, so at any moment all waiting
    # neighbours are equally likely to join next. The time at which a node joins is the length of
    # the shortest path to it. One shortest-path problem therefore orders the nodes of all graphs.
    wait = torch.empty(len(graph), dtype=torch.float32, device=graph.device).exponential_()  # [V]
    arrival = torch.full_like(wait, torch.inf).index_fill(0, first_nodes, 0.0)  # [V]
    wait = wait.index_select(0, target)  # [E]; index_select takes half the time of wait[target]
    while True:  # Bellman-Ford: relax all edges at once, until no arrival changes
        via_neighbours = arrival.index_select(0, source) + wait  # [E]
        sooner = arrival.scatter_reduce(0, target, via_neighbours, "amin")
        if torch.equal(sooner, arrival):
            break
        arrival = sooner
    # Sort the nodes by graph, and within a graph by arrival. Floats that are not negative have the
    # same order as their bits, so one integer holds the graph and the arrival.
    order = (graph << 32 | arrival.view(torch.int32)).argsort()
    position = torch.arange(len(graph), device=graph.device) - starts.index_select(0, graph)
    early = position < (sizes - (p * sizes).floor()).clamp(min=1).index_select(0, graph)
    # Nodes that no path connects to the first node never arrive, and are dropped.
    return torch.empty_like(early).scatter(0, order, early) & arrival.isfinite()


def draw_edges(
    sizes: Tensor, graph: Tensor, source: Tensor, target: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """Move a fraction ``p`` of the edges to random nodes of the same graph.

    Edges between the same two nodes move together, each in its direction, so an undirected graph
    stays undirected. Self-loops stay where they are. Return the new source and target ``[E]``.
    """
    low, high = torch.minimum(source, target), torch.maximum(source, target)
    base = max(len(graph), 1)
    # P different pairs of nodes are joined by edges. One integer encodes the two nodes of a pair.
    pairs, pair_of_edge = torch.unique(low * base + high, return_inverse=True)  # [P], [E]
    nodes = torch.stack([pairs // base, pairs % base])  # [2, P]
    graph = graph.index_select(0, nodes[0])  # [P]
    start = (sizes.cumsum(0) - sizes).index_select(0, graph)  # the graph's first node
    size = sizes.index_select(0, graph)
    first = _random_below(size)
    second = (first + 1 + _random_below(size - 1)) % size  # never the same node as `first`
    moves = (torch.rand(len(pairs), device=graph.device) < p) & (nodes[0] != nodes[1])
    nodes = torch.where(moves, start + torch.stack([first, second]), nodes)
    nodes = nodes.index_select(1, pair_of_edge)  # [2, E]
    source, target = torch.where(source <= target, nodes, nodes.flip(0))
    return source, target


def _random_below(limits: Tensor) -> Tensor:
    """Draw an integer from 0 to limit - 1 for each limit. Where the limit is 0, return 0."""
    return torch.randint_like(limits, 2**62) % limits.clamp(min=1)
