"""One InfoNCE run of a GCN, and losses that branch off from it with the same batches and views."""

import copy
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, degree

from experiments.common import results
from experiments.common.losses import KEPT, Objective, initialise

from ..data import load
from .measure import measured
from .rows import INFO_NCE, ROWS, SCHEDULE, STOPPED, UNTRAINED, Row

SETTING: dict[str, Any] = {
    "width": 128,
    "lr": 1e-3,
    "weight_decay": 1e-5,
    "temperature": 0.4,
    "edges_dropped": (0.2, 0.4),
    "features_masked": (0.3, 0.4),
}


class _Propagate(torch.autograd.Function):
    """A sparse matrix times a dense one, with the transposed matrix precomputed."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, transposed: Tensor, x: Tensor) -> Tensor:
        ctx.transposed = transposed
        return product(matrix, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, product(ctx.transposed, gradient)


def product(matrix: Tensor, x: Tensor) -> Tensor:
    """``matrix @ x``, which takes half as long again on a CPU where the matrix is sparse."""
    return matrix @ x if matrix.layout == torch.strided else torch.sparse.mm(matrix, x, "sum")


class Sparse:
    """A sparse matrix ordered by rows and by columns, so that dropping entries sorts nothing."""

    def __init__(self, indices: Tensor, shape: tuple[int, int]) -> None:
        self.sides = []
        for rows, columns, sizes in ((*indices, shape), (*indices.flip(0), shape[::-1])):
            order = (rows * sizes[1] + columns).argsort()
            ends = nn.functional.pad(rows.bincount(minlength=sizes[0]).cumsum(0), (1, 0))
            self.sides.append((order, ends, columns[order], sizes))

    def of(self, values: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix of the kept entries, and its transposed one."""
        made = []
        for order, ends, columns, sizes in self.sides:
            here = kept[order]
            starts = nn.functional.pad(here.cumsum(0), (1, 0))[ends]
            entries = values[order[here]]
            made.append(
                torch.sparse_csr_tensor(
                    starts, columns[here], entries, sizes, check_invariants=False
                )
            )
        return made[0], made[1]


class View(NamedTuple):
    """Two matrices with their transposed ones."""

    features: tuple[Tensor, Tensor]  # [N, F]
    adjacency: tuple[Tensor, Tensor]  # [N, N], normalised, with self-loops
    shown: Tensor  # [F]: features that are not hidden


class Graph:
    """A graph that views are drawn from."""

    def __init__(self, x: Tensor, edge_index: Tensor) -> None:
        count = len(x)
        self.x, self.edge_index = x, edge_index
        self.edges, _ = add_self_loops(edge_index, num_nodes=count)
        self.adjacency = Sparse(self.edges.flip(0), (count, count))
        self.features = x, x.T
        if (x != 0).float().mean() < 0.1:  # else a dense product is faster
            every = torch.ones(int(x.count_nonzero()), dtype=torch.bool)
            indices = x.nonzero().T
            self.features = Sparse(indices, (count, x.shape[1])).of(x[tuple(indices)], every)

    def view(self, edges: Tensor, features: Tensor) -> View:
        """With the edges ``[E]`` and features ``[F]`` that are True."""
        count = len(self.x)
        kept = torch.cat([edges, edges.new_ones(count)])
        scale = degree(self.edges[1, kept], count).rsqrt()
        values = scale[self.edges[0]] * scale[self.edges[1]]
        adjacency = self.adjacency.of(values, kept)
        return View(self.features, adjacency, features)

    def whole(self) -> View:
        ones = torch.ones(self.edge_index.shape[1] + self.x.shape[1], dtype=torch.bool)
        return self.view(*ones.split([self.edge_index.shape[1], self.x.shape[1]]))


class GCN(nn.Module):
    """Two layers. The sparse products of GCNConv take three times as long on a CPU."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(features, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)]
        )
        self.biases = nn.ParameterList([torch.zeros(2 * width), torch.zeros(width)])
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, view: View) -> Tensor:
        first, second = self.layers
        weight = first.weight.T * view.shown.unsqueeze(1)
        x = _Propagate.apply(*view.features, weight)
        x = torch.relu(_Propagate.apply(*view.adjacency, x) + self.biases[0])
        return torch.relu(_Propagate.apply(*view.adjacency, second(x)) + self.biases[1])


class Run:
    """The state of a training, which can be copied and continued."""

    def __init__(self, config: dict[str, Any], graph: Graph) -> None:
        torch.manual_seed(config["seed"])
        width, features = config["width"], graph.x.shape[1]
        self.config, self.graph = config, graph
        self.encoder = GCN(features, width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))
        self.optimizer = torch.optim.Adam(
            [*self.encoder.parameters(), *self.head.parameters()],
            lr=config["lr"],
            weight_decay=config["weight_decay"],
        )
        self.step = 0
        self.recent: deque[list[Tensor]] = deque()  # embeddings of the last batches, both views

    def copy(self) -> "Run":
        twin = copy.copy(self)
        twin.recent = self.recent.copy()
        twin.encoder, twin.head, twin.optimizer = copy.deepcopy(
            (self.encoder, self.head, self.optimizer)
        )
        return twin

    def views(self) -> list[Tensor]:
        """The embeddings of this step's batch in both views: by seed and step alone."""
        random = torch.Generator().manual_seed(self.config["seed"] * 1_000_003 + self.step)
        count, features = self.graph.x.shape
        edges = self.graph.edge_index.shape[1]
        batch = torch.randperm(count, generator=random)[: self.config["batch"]]
        views = []
        for dropped, hidden in zip(
            self.config["edges_dropped"], self.config["features_masked"], strict=True
        ):
            kept = torch.rand(edges, generator=random) >= dropped
            shown = torch.rand(features, generator=random) >= hidden
            view = self.graph.view(kept, shown)
            views.append(self.head(self.encoder(view)[batch]))
        return views

    def train(self, objective: Objective, until: int, begin: Callable[[int], None]) -> None:
        """Train until so many steps are done; ``begin`` is called before each."""
        while self.step < until:
            begin(self.step)
            views = self.views()
            loss = objective.loss(*views)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step += 1
            self.recent.append([view.detach() for view in views])
            if 2 * (len(self.recent) - 1) * len(views[0]) >= KEPT:
                self.recent.popleft()

    @torch.no_grad()
    def embeddings(self) -> Tensor:
        return self.encoder(self.graph.whole())

    @torch.no_grad()
    def projections(self) -> Tensor:
        return self.head(self.encoder(self.graph.whole()))


def configuration(config: dict[str, Any], row: str, length: int) -> dict[str, Any]:
    """The configuration of a record: the options of the row, as its name may change."""
    options, begins = ROWS[row]
    if row == UNTRAINED:
        return {**config, "row": row}
    return {**config, "length": length, "loss": options, "begins": begins}


def runs(
    config: dict[str, Any], file: Path, wanted: Collection[tuple[str, int]]
) -> Iterator[dict[str, Any]]:
    """A result for each row and length in ``wanted``, of one set, batch and seed."""
    torch.set_num_threads(1)
    graph, labels = graph_of(file)

    def result(row: str, length: int, run: Run, started: float) -> dict[str, Any]:
        seconds = {"training": round(time.perf_counter() - started, 1)}
        values = measured(run.embeddings().numpy(), labels, config["seed"])
        seconds["all"] = round(time.perf_counter() - started, 1)
        return {"config": configuration(config, row, length), **values, "seconds": seconds}

    trunk = Run(config, graph)
    if (UNTRAINED, 0) in wanted:
        yield result(UNTRAINED, 0, trunk, time.perf_counter())
    stops: dict[int, list[tuple[str, int]]] = {}  # step -> rows that branch off
    for row, length in wanted:
        if row != UNTRAINED:
            stops.setdefault(round(ROWS[row].begins * length), []).append((row, length))
    plain = Objective({}, config["width"], config["temperature"], 1)
    for stop, leaving in sorted(stops.items()):
        started = time.perf_counter()
        trunk.train(plain, stop, lambda step: None)
        # A row that branches off at step 0 is one run for all lengths.
        branches: dict[str, tuple[Run, Objective]] = {}
        for row, length in sorted(leaving, key=lambda each: each[1]):
            if row in (INFO_NCE, STOPPED):
                yield result(row, length, trunk, started)
                continue
            started = time.perf_counter()
            if row not in branches or stop > 0:
                branches[row] = branched(trunk, ROWS[row], length)
            branch, objective = branches[row]
            branch.train(objective, length, again(branch, objective, ROWS[row], stop))
            yield result(row, length, branch, started)


def keep(
    config: dict[str, Any], file: Path, wanted: Collection[tuple[str, int]], output: Path
) -> None:
    """Append each result to a file when it is finished."""
    for run in runs(config, file, wanted):
        results.append(output, run | {"versions": results.VERSIONS})


def graph_of(file: Path) -> tuple[Graph, np.ndarray]:
    """The graph of a file, with features of unit length, and its labels."""
    data = load(file)
    return Graph(nn.functional.normalize(data.x), data.edge_index), data.y.numpy()


def branched(trunk: Run, row: Row, length: int) -> tuple[Run, Objective]:
    """A copy of the run with another loss, its prototypes initialised."""
    branch, config = trunk.copy(), trunk.config
    torch.manual_seed(config["seed"])
    options = {name: value for name, value in row.options.items() if name not in SCHEDULE}
    if isinstance(options.get("num_prototypes"), str):  # a divisor of the batch
        batch = min(config["batch"], len(trunk.graph.x))
        options["num_prototypes"] = batch // int(options["num_prototypes"].removeprefix("N/"))
    objective = Objective(options, config["width"], config["temperature"], length)
    pgcl = objective.pgcl()
    if row.options.get("by_itself", False):
        initialise(pgcl, torch.cat([view for views in branch.recent for view in views])[-KEPT:])
    elif pgcl is not None and trunk.step > 0:
        pgcl.prototypes.start_from_(branch.projections())
    own = list(objective.parameters())
    if own and not row.options.get("fixed", False):
        branch.optimizer.add_param_group({"params": own})
    return branch, objective


def again(branch: Run, objective: Objective, row: Row, begin: int) -> Callable[[int], None]:
    """Initialise the prototypes again, every so many steps, if the row has ``again``."""
    every = row.options.get("again", 0)

    def begin_step(step: int) -> None:
        if every and step > begin and (step - begin) % every == 0:
            objective.pgcl().prototypes.start_from_(branch.projections())

    return begin_step
