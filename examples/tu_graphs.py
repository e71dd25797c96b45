"""Train a GIN without labels on a TU set by InfoNCE or PGCL; evaluate it by a linear probe.

PyG downloads the set unless it is in --root. Only the probe, in ten folds, uses labels. MUTAG takes
less than ten seconds on a CPU:

    python examples/tu_graphs.py --dataset MUTAG
    python examples/tu_graphs.py --dataset MUTAG --loss PGCL --output encoder.pt
"""

import argparse
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric import seed_everything  # pip install -e '.[experiments]'
from torch_geometric.data import Batch
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="A GIN trained without labels on a TU set.")
parser.add_argument("--dataset", default="MUTAG")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--loss", choices=["InfoNCE", "PGCL"], default="InfoNCE")
parser.add_argument("--temperature", type=float, default=0.5, help="try 0.2, 0.5, 1 and 2")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=40)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", type=Path, help="new file for the state_dict of the encoder")
args = parser.parse_args()
if args.output and (args.output.exists() or not args.output.parent.is_dir()):
    parser.error(f"--output must be a new file in an existing folder, but it is {args.output}")

HIDDEN = 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
seed_everything(args.seed)
dataset = TUDataset(args.root, args.dataset)  # writes to --root: copy a read-only set first
if dataset.num_features == 0:
    dataset.transform = Constant()
train_loader = DataLoader(dataset, args.batch_size, shuffle=True)
test_loader = DataLoader(dataset, args.batch_size)


class Encoder(torch.nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gin = GIN(num_features, HIDDEN, num_layers=3, norm="batch_norm", jk="cat")

    def forward(self, data: Batch) -> Tensor:
        x = self.gin(data.x, data.edge_index)
        return global_add_pool(x, data.batch)  # [num_graphs, HIDDEN]


encoder = Encoder(dataset.num_features).to(device)
head = MLP([HIDDEN, HIDDEN, HIDDEN], norm=None).to(device)
augment1, augment2 = NodeDrop(p=0.2), EdgePerturb(p=0.2)
if args.loss == "PGCL":
    criterion = PGCLLoss(HIDDEN, consistency_weight=1, temperature=args.temperature).to(device)
else:
    criterion = InfoNCE(temperature=args.temperature)
parameters = [*encoder.parameters(), *head.parameters(), *criterion.parameters()]
optimizer = torch.optim.Adam(parameters, lr=1e-3)


def train() -> float:
    encoder.train()
    total_loss = 0.0
    for data in train_loader:
        data = data.to(device)
        z1, z2 = head(encoder(augment1(data))), head(encoder(augment2(data)))
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * data.num_graphs
    return total_loss / len(dataset)


@torch.no_grad()
def test() -> float:
    encoder.eval()
    x = torch.cat([encoder(data.to(device)).cpu() for data in test_loader]).numpy()
    y = torch.cat([data.y for data in test_loader]).numpy()
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    return cross_val_score(probe, x, y, cv=10).mean()


print(f"{args.dataset}: {len(dataset)} graphs, linear probe {test():.4f} untrained")
progress = tqdm(range(1, args.epochs + 1), unit="epoch")
for epoch in progress:
    line = f"Epoch: {epoch:03d}, Loss: {train():.4f}"
    if epoch % 5 == 0 or epoch == args.epochs:
        line += f", Linear probe: {test():.4f}"
    progress.write(line)

if args.output:
    torch.save(encoder.state_dict(), args.output)
