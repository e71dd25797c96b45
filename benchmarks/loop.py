"""Time a training step with GraphCL's own loss, with InfoNCE and with PGCLLoss; write JSON.

python -m benchmarks.loop
python -m benchmarks.loop --rounds 5 --output /tmp/loop.json

The encoder, the augmentations and the optimizer are those of examples/graphcl_swap.py, on one
thread. Each loss has a model of its own.
"""

import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import NodeDrop

from . import measure, scripts

GRAPHS, NODES, TYPES = 128, (12, 24), 7  # as large as the graphs of MUTAG
DIM, LAYERS = 32, 3
SCRIPT = "GraphCL's loss_cal"


def graphs(device: str) -> Batch:
    """Random trees with three more edges each, and a type of each node."""
    random, made = Random(0), []
    for _ in range(GRAPHS):
        num = random.randint(*NODES)
        edges = [(random.randrange(node), node) for node in range(1, num)]
        edges += [tuple(random.sample(range(num), 2)) for _ in range(3)]
        types = torch.tensor(random.choices(range(TYPES), k=num))
        edge_index = to_undirected(torch.tensor(edges).T)
        made.append(Data(x=F.one_hot(types, TYPES).float(), edge_index=edge_index))
    return Batch.from_data_list(made).to(device)


def step_of(loss: nn.Module | Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Callable:
    """A step of training a new model with this loss."""
    torch.manual_seed(0)
    gin = GIN(TYPES, DIM, LAYERS, norm="batch_norm", jk="cat")
    trained = nn.ModuleList([gin, head := MLP([DIM, DIM, DIM], norm=None)]).to(batch.x.device)
    if isinstance(loss, nn.Module):
        trained.append(loss.to(batch.x.device))
    optimizer, augment = torch.optim.Adam(trained.parameters(), lr=1e-3), NodeDrop()

    def step() -> None:
        views = augment(batch), augment(batch)
        value = loss(*(head(global_add_pool(gin(v.x, v.edge_index), v.batch)) for v in views))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    return step


def tables(args: Any) -> Iterator[list[dict[str, Any]]]:
    batch = graphs(args.device)
    loss_cal, info_nce = scripts.SCRIPTS["GraphCL"]
    losses = {SCRIPT: loss_cal, "InfoNCE": info_nce, "PGCLLoss": PGCLLoss(DIM)}
    with measure.on_threads(1):
        steps = {name: step_of(loss, batch) for name, loss in losses.items()}
        times = measure.time_in_turn(steps, args.rounds)
    size = f"{batch.num_graphs} graphs of {batch.num_nodes / batch.num_graphs:.0f} nodes"
    yield measure.rows("loop", size, f"GIN {LAYERS} x {DIM}", times, SCRIPT)


if __name__ == "__main__":
    args = measure.parser(__doc__, rounds=101).parse_args()
    warnings.filterwarnings("ignore", "pgcl_losses: ")  # the same graphs in every step
    measure.report("loop", args, tables(args))
