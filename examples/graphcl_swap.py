"""GraphCL on a TU set, with InfoNCE or PGCL in place of its `loss_cal`.

InfoNCE with these options has the value of `loss_cal`; --pgcl trains with PGCL instead, after
InfoNCE for half of the epochs.
PyG downloads the set unless it is in --root. MUTAG takes less than ten seconds on a CPU:

    python examples/graphcl_swap.py --dataset MUTAG
    python examples/graphcl_swap.py --dataset MUTAG --pgcl
"""

import argparse
import math

import torch
from sklearn.linear_model import LogisticRegression  # pip install -r requirements.txt
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch_geometric.datasets import TUDataset  # pip install -r requirements.txt
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant
from tqdm import tqdm  # pip install -r requirements.txt

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb, NodeDrop, RandomChoice, Subgraph

parser = argparse.ArgumentParser()
parser.add_argument("--pgcl", action="store_true", help="InfoNCE() first, PGCL later")
parser.add_argument("--dataset", default="MUTAG")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
if args.epochs < 0:
    parser.error("--epochs must be 0 or more")

DIM = 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GraphCL(torch.nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.gin = GIN(num_features, DIM, num_layers=3, norm="batch_norm", jk="cat")
        self.proj_head = MLP([DIM, DIM, DIM], norm=None)

    def encode(self, data):
        return global_add_pool(self.gin(data.x, data.edge_index), data.batch)

    def forward(self, data):
        return self.proj_head(self.encode(data))


@torch.no_grad()
def evaluate():
    model.eval()
    z = torch.cat([model.encode(data.to(device)).cpu() for data in DataLoader(dataset, 128)])
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    return cross_val_score(probe, z.numpy(), [data.y.item() for data in dataset], cv=5).mean()


torch.manual_seed(args.seed)
try:
    dataset = TUDataset(args.root, args.dataset)  # writes to --root: copy a read-only set first
except OSError as error:
    parser.error(f"--root must be a folder with {args.dataset}, or where PyG can store it: {error}")
if dataset.num_features == 0:
    dataset.transform = Constant()
augment = RandomChoice([NodeDrop(), EdgePerturb(), AttributeMask(), Subgraph()])
model = GraphCL(dataset.num_features)
model.loss = model.later = InfoNCE.like("GraphCL")
if args.pgcl:
    model.loss, model.later = InfoNCE(), PGCLLoss(DIM, 50)
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # PGCL's prototypes as well

# At most 128 graphs, and equal batches: the step of a small last one would count as much as others.
batch_size = math.ceil(len(dataset) / math.ceil(len(dataset) / 128))
before = evaluate()
for epoch in tqdm(range(args.epochs), unit="epoch"):
    model.train()
    loss_of = model.loss if epoch < args.epochs // 2 else model.later
    for data in DataLoader(dataset, batch_size, shuffle=True):
        x, x_aug = model(data.to(device)), model(augment(data.to(device)))
        loss = loss_of(x, x_aug)  # was: model.loss_cal(x, x_aug)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
name = "PGCL" if args.pgcl else "InfoNCE"
print(f"{name}, {len(dataset)} graphs: linear probe {before:.3f} untrained, {evaluate():.3f} after")
