# %% [markdown]
# # Swap it into a GraphCL script
#
# Change two lines of a GraphCL script to train it with PGCL, and avoid the commonest mistake.
# Try [`InfoNCE` with a tuned temperature](../swap.md) first: it has no prototypes.
#
# You need `torch-geometric`, `scikit-learn` and `matplotlib`. It takes a quarter of a minute on
# one core.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb, NodeDrop, RandomChoice, Subgraph

# %% [markdown]
# ## The script as it is
#
# The graphs are synthetic: random trees in six classes, with nodes of 11 types. The class, from
# 0 to 5, is the usual difference between the types of a node and its parent.

# %%
TYPES, CLASSES, GRAPHS = 11, 6, 256
BATCH, DIM, EPOCHS = 64, 32, 12


def random_tree(label: int) -> Data:
    nodes = int(torch.randint(20, 40, ()))
    parents = [int(torch.randint(child, ())) for child in range(1, nodes)]
    types = torch.randint(TYPES, (nodes,))
    for child, parent in enumerate(parents, start=1):
        if torch.rand(()) < 0.6:
            types[child] = (types[parent] + label) % TYPES
    edges = to_undirected(torch.tensor([parents, list(range(1, nodes))]))
    return Data(x=F.one_hot(types, TYPES).float(), edge_index=edges, y=label)


torch.manual_seed(0)
graphs = [random_tree(i % CLASSES) for i in range(GRAPHS)]
augment = RandomChoice([NodeDrop(), EdgePerturb(), AttributeMask(), Subgraph()])


class GraphCL(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gin = GIN(TYPES, DIM, num_layers=3, norm="batch_norm")
        self.proj_head = torch.nn.Sequential(
            torch.nn.Linear(DIM, DIM), torch.nn.ReLU(), torch.nn.Linear(DIM, DIM)
        )

    def encode(self, data: Data) -> torch.Tensor:
        return global_add_pool(self.gin(data.x, data.edge_index), data.batch)

    def forward(self, data: Data) -> torch.Tensor:
        return self.proj_head(self.encode(data))

    def loss_cal(self, x: torch.Tensor, x_aug: torch.Tensor) -> torch.Tensor:
        cosines = F.normalize(x) @ F.normalize(x_aug).T
        return F.cross_entropy(cosines / 0.2, torch.arange(len(x)))


def train_graphcl() -> tuple[GraphCL, list[float]]:
    torch.manual_seed(0)
    loader = DataLoader(graphs, BATCH, shuffle=True)
    model = GraphCL()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(EPOCHS):
        for data in loader:
            x, x_aug = model(data), model(augment(data))
            loss = model.loss_cal(x, x_aug)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, losses


# %% [markdown]
# ## The same with PGCL
#
# Two changes, marked by numbers:
#
# 1. The loss becomes an attribute of the model, under a name that no method of the class has, and
#    before the optimizer is made: `model.parameters()` then holds the prototypes. `dim` is the
#    embedding dimension, `x.shape[1]`.
# 2. The line that computes the loss.


# %%
def train_pgcl() -> tuple[GraphCL, list[float]]:
    torch.manual_seed(0)
    loader = DataLoader(graphs, BATCH, shuffle=True)
    model = GraphCL()
    model.pgcl = PGCLLoss(DIM, BATCH // 3, consistency_weight=1)  # 1
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(EPOCHS):
        for data in loader:
            x, x_aug = model(data), model(augment(data))
            terms = model.pgcl.terms(x, x_aug)
            loss = terms.loss  # 2; or: loss = model.pgcl(x, x_aug)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(terms.contrast.item())
    return model, losses


# %% [markdown]
# ## Linear probe
#
# The probe is a logistic regression on the embeddings of `encode`, in five folds.


# %%
@torch.no_grad()
def probe(model: GraphCL) -> float:
    model.eval()
    (everything,) = DataLoader(graphs, len(graphs))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    embeddings, labels = model.encode(everything).numpy(), everything.y.numpy()
    return 100 * cross_val_score(classifier, embeddings, labels, cv=5).mean()


torch.manual_seed(0)
print(f"untrained     {probe(GraphCL()):.1f} %")
graphcl, old_losses = train_graphcl()
print(f"GraphCL       {probe(graphcl):.1f} %")
swapped, new_losses = train_pgcl()
print(f"PGCL          {probe(swapped):.1f} %")

# %% [markdown]
# Both learn. Use several seeds to compare the losses.
#
# The picture shows the contrast by step. The values cannot be compared: PGCL takes negatives from
# both views, the script from the other view alone, and PGCL leaves embeddings of the query's
# cluster out of the negatives.

# %% Contrast by step: the script as it was, and with PGCL
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(old_losses, label="loss_cal")
axes.plot(new_losses, label="PGCL, contrast")
axes.set(xlabel="step", ylabel="contrast")
axes.legend()
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## The commonest mistake
#
# If the optimizer is made before the loss, it does not have the prototypes, and they never move.
# After 16 steps a warning says this:

# %%
model = GraphCL()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.pgcl = PGCLLoss(DIM)  # too late
data = next(iter(DataLoader(graphs, BATCH)))


def movement(steps: int) -> float:
    before = model.pgcl.prototypes.weight.detach().clone()
    for _ in range(steps):
        optimizer.zero_grad()
        model.pgcl(model(data), model(augment(data))).backward()
        optimizer.step()
    return (model.pgcl.prototypes.weight.detach() - before).abs().max().item()


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(f"prototypes moved by {movement(60):.3f}")
for warning in caught:
    print("warning:", warning.message)

# %% [markdown]
# Add the prototypes to the existing optimizer:

# %%
optimizer.add_param_group({"params": model.pgcl.parameters()})
print(f"prototypes moved by {movement(10):.3f}")

# %% [markdown]
# ## Next steps
#
# [Swap it into your script](../swap.md) covers PyGCL, DIG, Lightning, DGL, JOAO and AD-GCL.
