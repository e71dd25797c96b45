"""GRACE-style contrast of the nodes of one graph, 100,000 of them, with PGCL and PyG.

Two layers of GCN encode the graph in two views, which drop edges and mask features; row i of both
is node i. A dense loss over every node would store a 200,000 x 200,000 matrix, 160 GB. On a CPU
PGCLLoss computes blocks of pairs and stores none (the process takes 0.7 GB, 0.4 of them for its
imports). A step over every pair takes 80 s on two cores. Each step therefore contrasts
--contrast-nodes random nodes, as is usual for GRACE on large graphs; 16,384 of them take 3 s.
Each step has other negatives, and the encoder encodes all nodes.

    python examples/node_level.py
    python examples/node_level.py --contrast-nodes 0 --steps 1   # every node

The graph is a stochastic block model: nodes have more neighbours in their own community, and faint
features of it. Communities are used only after training: by a linear probe on held-out nodes, and
by the mutual information (NMI) of communities and nearest prototypes.
"""

import argparse
import ctypes
import resource
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data  # pip install -e '.[experiments]'
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.transforms import Compose
from torch_geometric.utils import to_undirected
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb

parser = argparse.ArgumentParser(description="Node contrast on one large graph.")
parser.add_argument("--nodes", type=int, default=100_000)
parser.add_argument("--contrast-nodes", type=int, default=16384, help="per step; 0: every node")
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

COMMUNITIES, INSIDE, ACROSS = 10, 4, 4  # mean number of neighbours in the own one, and anywhere
FEATURES, HIDDEN, DIM, RATE = 32, 32, 32, 1e-2
PROBED = 2000  # nodes to fit the probe on; five times as many to score it
for name, least in {"nodes": PROBED + 1, "contrast_nodes": 0, "steps": 1}.items():
    if getattr(args, name) < least:
        option = f"--{name.replace('_', '-')}"
        parser.error(f"{option} must be {least} or more, but it is {getattr(args, name)}")


def block_model(num_nodes: int) -> Data:
    """Edges are drawn one by one, so that memory grows with them and not with pairs of nodes."""
    labels = torch.arange(num_nodes) % COMMUNITIES
    inside, across = num_nodes * INSIDE // 2, num_nodes * ACROSS // 2
    source = torch.randint(num_nodes, (inside,))
    own = torch.randint(num_nodes // COMMUNITIES, (inside,)) * COMMUNITIES + labels[source]
    edges = [torch.stack([source, own]), torch.randint(num_nodes, (2, across))]
    faint = 0.3 * torch.randn(COMMUNITIES, FEATURES)[labels] + torch.randn(num_nodes, FEATURES)
    return Data(x=faint, edge_index=to_undirected(torch.cat(edges, 1)), y=labels)


class Encoder(nn.Module):
    """Two layers of GCN, as products with a sparse matrix: no edge holds a message."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, DIM)
        for layer in (self.lin1, self.lin2):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, weight = gcn_norm(edge_index, num_nodes=len(x))
        size = len(x), len(x)
        adjacency = torch.sparse_coo_tensor(
            edge_index.flip(0), weight, size, check_invariants=False
        )
        return adjacency @ self.lin2(torch.relu(adjacency @ self.lin1(x)))


augment = Compose([EdgePerturb(0.3), AttributeMask(0.3)])


def view_of(encoder: Encoder, x: Tensor, edge_index: Tensor) -> Tensor:
    view = augment(Data(x, edge_index))
    return encoder(view.x, view.edge_index)


def sampled(z1: Tensor, z2: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """So many nodes, drawn anew for each step and the same in both views."""
    if count == len(z1):
        return z1, z2
    nodes = torch.randperm(len(z1), device=z1.device)[:count]
    return z1[nodes], z2[nodes]


@torch.no_grad()
def look(encoder: Encoder, pgcl: PGCLLoss, graph: Data) -> str:
    z = encoder(graph.x, graph.edge_index)
    nearest = pgcl.prototypes.assign(z).cpu()
    nodes = torch.randperm(len(z))[: 6 * PROBED]
    z, labels = z.cpu()[nodes], graph.y.cpu()[nodes]
    z = torch.cat([z, torch.ones(len(z), 1)], dim=1).double()
    probe = torch.linalg.lstsq(z[:PROBED], one_hot(labels[:PROBED]).double()).solution
    accuracy = ((z[PROBED:] @ probe).argmax(1) == labels[PROBED:]).double().mean()
    nmi = mutual_information(graph.y.cpu(), nearest)
    return f"linear probe {accuracy:.3f}, NMI of prototypes {nmi:.3f}"


def mutual_information(labels: Tensor, clusters: Tensor) -> Tensor:
    """Of two ways to divide the nodes, as a fraction of their mean entropy."""
    both = one_hot(labels).float().T @ one_hot(clusters).float() / len(labels)
    of_both, of_labels, of_clusters = (
        torch.special.entr(p).sum() for p in (both, both.sum(1), both.sum(0))
    )
    return 2 * (of_labels + of_clusters - of_both) / (of_labels + of_clusters)


def give_memory_back() -> None:
    """Of large tensors, once they are gone; glibc would keep it, in pieces. Costs half a second."""
    c_library = ctypes.CDLL(None)
    if hasattr(c_library, "mallopt"):
        c_library.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: each is a mapping of its own


def peak_gb() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def main() -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contrasted = min(args.contrast_nodes or args.nodes, args.nodes)
    if contrasted == args.nodes:
        give_memory_back()
    graph = block_model(args.nodes).to(device)
    encoder, pgcl = Encoder().to(device), PGCLLoss(DIM).to(device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()], lr=RATE)

    print(f"{graph.num_nodes} nodes, {graph.num_edges // 2} edges, {contrasted} contrasted a step")
    print("before:", look(encoder, pgcl, graph))
    start = time.perf_counter()
    with tqdm(range(args.steps), unit="step") as progress:
        for _ in progress:
            # Of a view its embeddings alone are kept: backward draws and encodes it once more.
            given = encoder, graph.x, graph.edge_index
            views = (checkpoint(view_of, *given, use_reentrant=False) for _ in range(2))
            loss = pgcl(*sampled(*views, contrasted))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress.set_postfix(loss=f"{loss.item():.3f}")
    seconds = (time.perf_counter() - start) / args.steps
    print("after: ", look(encoder, pgcl, graph))

    own, whole = ((2 * nodes) ** 2 * 4 / 1e9 for nodes in (contrasted, args.nodes))
    print(f"{seconds:.2f} s a step; peak memory of the process {peak_gb():.2f} GB")
    print(f"one matrix of a dense loss would take {own:.2f} GB, over every node {whole:.2f} GB")


if __name__ == "__main__":
    main()
