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
    # All edges between the same two nodes need the same random numbers. Therefore the numbers are a
    # hash of random keys of both nodes. Finding such edges by a sort takes more than twice as long.
    keys = torch.randint(2**63 - 1, (len(graph),), device=graph.device)  # [V]
    numbers = _mix(keys.index_select(0, source) + keys.index_select(0, target))  # [E]
    moves = (numbers & (2**53 - 1) < int(p * 2**53)) & (source != target)
    moved = moves.nonzero().squeeze(1)  # [M], the edges that move
    numbers, old_source = numbers.index_select(0, moved), source.index_select(0, moved)
    graph = graph.index_select(0, old_source)
    start = (sizes.cumsum(0) - sizes).index_select(0, graph)  # the graph's first node
    size = sizes.index_select(0, graph)
    first = (numbers := _mix(numbers)) % size
    second = (first + 1 + _mix(numbers) % (size - 1)) % size  # never the same node as `first`
    ascends = old_source < target.index_select(0, moved)
    return (
        source.index_copy(0, moved, start + torch.where(ascends, first, second)),
        target.index_copy(0, moved, start + torch.where(ascends, second, first)),
    )


def _mix(numbers: Tensor) -> Tensor:
    """Hash int64 numbers by the last steps of SplitMix64: each bit depends on all bits."""
    numbers = (numbers ^ numbers >> 30) * -0x40A7B892E31B1A47
    numbers = (numbers ^ numbers >> 27) * -0x6B2FB644ECCEEE15
    return numbers ^ numbers >> 31


def _random_below(limits: Tensor) -> Tensor:
    """Draw an integer from 0 to limit - 1 for each limit. Where the limit is 0, return 0."""
    return torch.randint_like(limits, 2**62) % limits.clamp(min=1)
