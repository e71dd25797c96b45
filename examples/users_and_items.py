"""Recommendation: users against all items, with LightGCN and InfoNCE.

A user's items are its positives, all other items are its negatives. The interactions are synthetic:
users prefer the items of one genre. The script prints recall at 20, the fraction of held-out
interactions that are among the first 20 items of their users. Ten seconds on a CPU:

    python examples/users_and_items.py --epochs 10
"""

import argparse

import torch
from torch_geometric import seed_everything  # pip install -e '.[pyg]'
from torch_geometric.nn import LightGCN
from torch_geometric.utils import to_undirected

from pgcl_losses import InfoNCE

parser = argparse.ArgumentParser(description="Users against all items.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

USERS, ITEMS, GENRES, DIM = 1000, 500, 10, 64
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
seed_everything(args.seed)
same_genre = torch.arange(USERS)[:, None] % GENRES == torch.arange(ITEMS) % GENRES
user, item = (torch.rand(USERS, ITEMS) < torch.where(same_genre, 0.3, 0.01)).nonzero().T
edges = torch.stack([user, USERS + item]).to(device)  # positions: first all users, then all items
held_out = torch.rand(len(user), device=device) < 0.2
train_edges, test_edges = edges[:, ~held_out], edges[:, held_out]
edge_index = to_undirected(train_edges)

model = LightGCN(USERS + ITEMS, DIM, num_layers=2).to(device)
criterion = InfoNCE(temperature=0.2, negatives="cross", queries="first")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def train():
    users, items = model.get_embedding(edge_index).split([USERS, ITEMS])
    loss = criterion(users, items, positives=train_edges)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    users, items = model.get_embedding(edge_index).split([USERS, ITEMS])
    scores = users @ torch.nn.functional.normalize(items).T
    scores[train_edges[0], train_edges[1] - USERS] = -torch.inf  # items that the user knows
    first = scores.topk(20).indices[test_edges[0]]
    return (first == test_edges[1, :, None] - USERS).any(1).float().mean().item()


print(f"Epoch: 000, Recall@20: {test():.3f}")
for epoch in range(1, args.epochs + 1):
    print(f"Epoch: {epoch:03d}, Loss: {train():.3f}, Recall@20: {test():.3f}")
