"""Link prediction with sampled negatives: InfoNCE in place of binary cross-entropy.

A node's neighbours are its positives, sampled nodes are its negatives, and scores are dot products.
The graph is a stochastic block model with weak features. Ten seconds on a CPU:

    python examples/link_prediction.py --epochs 10
"""

import argparse

import torch
from sklearn.metrics import roc_auc_score  # pip install -e '.[experiments]'
from torch_geometric import seed_everything  # pip install -e '.[experiments]'
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import negative_sampling, stochastic_blockmodel_graph

from pgcl_losses import InfoNCE

parser = argparse.ArgumentParser(description="Link prediction with sampled negatives.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--negatives", type=int, default=5, help="for each edge")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

BLOCKS, NODES, FEATURES, DIM = 10, 100, 32, 32  # NODES: of a block
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
seed_everything(args.seed)
edge_probs = 0.002 + 0.08 * torch.eye(BLOCKS)
edge_index = stochastic_blockmodel_graph(BLOCKS * [NODES], edge_probs)
x = 0.3 * torch.randn(BLOCKS, FEATURES).repeat_interleave(NODES, 0)
graph = Data(x=x + torch.randn_like(x), edge_index=edge_index).to(device)
train_data, _, test_data = RandomLinkSplit(num_val=0, num_test=0.2, is_undirected=True)(graph)

encoder = GCN(FEATURES, 64, num_layers=2, out_channels=DIM).to(device)
criterion = InfoNCE(temperature=1.0, similarity="dot")
optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-2)


def train():
    edges = train_data.edge_index
    sampled = negative_sampling(edges, train_data.num_nodes, args.negatives * edges.size(1))
    loss = criterion(encoder(train_data.x, edges), positives=edges, negative_pairs=sampled)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    z, (source, target) = encoder(test_data.x, test_data.edge_index), test_data.edge_label_index
    return roc_auc_score(test_data.edge_label.cpu(), (z[source] * z[target]).sum(1).cpu())


print(f"Epoch: 000, AUC: {test():.3f}")
for epoch in range(1, args.epochs + 1):
    print(f"Epoch: {epoch:03d}, Loss: {train():.3f}, AUC: {test():.3f}")
