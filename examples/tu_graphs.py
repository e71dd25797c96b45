"""A GIN, pre-trained by InfoNCE on a TU set, and the accuracy of a linear probe in ten folds.

PyG downloads the set unless it is in --root. Only the probe uses labels.

    python examples/tu_graphs.py --dataset MUTAG --temperature 0.5
"""

import argparse
import re
import tempfile

import torch
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch_geometric.data import Batch  # pip install -e '.[experiments]'
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant

from pgcl_losses import InfoNCE
from pgcl_losses.adapters.pyg import EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="A GIN, pre-trained by InfoNCE on a TU set.")
parser.add_argument("--dataset", default="MUTAG")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--temperature", type=float, default=0.5, help="try 0.2 to 2")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()
if not re.fullmatch(r"[\w-]+", args.dataset):
    parser.error(f"--dataset must be the name of a set, no path, but it is {args.dataset}")
for name in ("temperature", "batch-size", "epochs"):
    if not (value := getattr(args, name.replace("-", "_"))) > 0:
        parser.error(f"--{name} must be above 0, but it is {value:g}")

HIDDEN = 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
read = tempfile.TemporaryDirectory()


class TUGraphs(TUDataset):
    """Reads text files only: PyG would unpickle what lies in `processed` beside them."""

    processed_dir = read.name


dataset = TUGraphs(args.root, args.dataset)
if dataset.num_features == 0:
    dataset.transform = Constant()
train_loader = DataLoader(dataset, args.batch_size, shuffle=True)
test_loader = DataLoader(dataset, args.batch_size)


class Model(torch.nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gin = GIN(num_features, HIDDEN, num_layers=3, norm="batch_norm", jk="cat")
        self.head = MLP([HIDDEN, HIDDEN, HIDDEN], norm=None)

    def forward(self, data: Batch) -> Tensor:
        x = self.gin(data.x, data.edge_index)
        return global_add_pool(x, data.batch)


model = Model(dataset.num_features).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
augment1, augment2 = NodeDrop(p=0.2), EdgePerturb(p=0.2)
criterion = InfoNCE(temperature=args.temperature)


def train() -> float:
    model.train()
    total_loss = 0.0
    for data in train_loader:
        data = data.to(device)
        z1, z2 = (model.head(model(augment(data))) for augment in (augment1, augment2))
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * data.num_graphs
    return total_loss / len(dataset)


@torch.no_grad()
def test() -> float:
    model.eval()
    x = torch.cat([model(data.to(device)).cpu() for data in test_loader]).numpy()
    y = torch.cat([data.y for data in test_loader]).numpy()
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    return cross_val_score(probe, x, y, cv=10).mean()


print(f"{args.dataset}: {len(dataset)} graphs, linear probe {test():.4f} untrained")
for epoch in range(1, args.epochs + 1):
    line = f"Epoch: {epoch:03d}, Loss: {train():.4f}"
    if epoch % 5 == 0 or epoch == args.epochs:
        line += f", Linear probe: {test():.4f}"
    print(line)
