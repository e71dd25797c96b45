# %% [markdown]
# # Nodes of Cora: initialisation, warm-up, diagnostics
#
# With nodes, all in one batch, PGCL from the first step does most harm. Three things matter:
# initial prototypes, the warm-up, and what `diagnostics` shows of both.
#
# You need `torch-geometric`, `scikit-learn` and `matplotlib`. It takes half a minute on one
# core.

# %%
from math import nan
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCNConv
from torch_geometric.utils import dropout_edge, mask_feature, stochastic_blockmodel_graph

from pgcl_losses import InfoNCE, PGCLLoss, diagnostics

# %% [markdown]
# ## One graph
#
# With `FOLDER = None` nothing is downloaded, and the graph is a *stochastic block model*: nodes
# have more neighbours in their own block than elsewhere, and a few words each, some of them
# about their block's topic. To use Cora, name a folder that has `Cora/raw/ind.cora.x` and its
# other files. Or name any folder and set `DOWNLOAD = True`: then PyG downloads Cora into it.
# With Cora it takes some minutes.

# %%
FOLDER = None  # or "data"
DOWNLOAD = False


def block_model(nodes: int = 700, blocks: int = 7, words: int = 10) -> Data:
    labels = torch.arange(blocks).repeat_interleave(nodes // blocks)
    inside, across = 3 * blocks / nodes, 2 / nodes  # 3 neighbours in the own block, 2 anywhere
    chances = torch.full((blocks, blocks), across) + inside * torch.eye(blocks)
    edge_index = stochastic_blockmodel_graph([nodes // blocks] * blocks, chances)
    # A node has ten words: on average two of its own topic, and eight of any.
    vocabulary = 80 * blocks
    of_topic = torch.randint(80, (nodes, words)) * blocks + labels[:, None]
    of_any = torch.randint(vocabulary, (nodes, words))
    chosen = torch.where(torch.rand(nodes, words) < 0.2, of_topic, of_any)
    x = torch.zeros(nodes, vocabulary).scatter_(1, chosen, 1)
    return Data(x=x, edge_index=edge_index, y=labels)


torch.manual_seed(0)
if FOLDER is None:
    graph = block_model()
else:
    if not DOWNLOAD and not (Path(FOLDER) / "Cora" / "raw" / "ind.cora.x").is_file():
        raise FileNotFoundError(f"{FOLDER} has no Cora/raw/ind.cora.x, and DOWNLOAD is False")
    graph = Planetoid(FOLDER, "Cora")[0]
x, labels, classes = F.normalize(graph.x, p=1), graph.y.numpy(), int(graph.y.max()) + 1
print(f"{graph.num_nodes} nodes, {graph.num_edges // 2} edges, {classes} classes")

# %% [markdown]
# ## Encoder and views
#
# Two layers of GCN, and a projection head behind them, as in GRACE. A view leaves out some
# edges and hides some words from all nodes. Row i of both views is node i.


# %%
class Model(torch.nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = GCNConv(words, 2 * WIDTH), GCNConv(2 * WIDTH, WIDTH)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ELU(), torch.nn.Linear(WIDTH, WIDTH)
        )

    def embed(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x, edge_index)), edge_index))

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x, edge_index))


def view_of(graph: Data) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, _ = mask_feature(x, p=0.3, mode="col")
    edge_index, _ = dropout_edge(graph.edge_index, p=0.3)
    return hidden, edge_index


WIDTH, STEPS, TAU = 64, 120, 0.4

# %% [markdown]
# ## Training, with a look inside
#
# `pgcl.terms` gives the loss and what it is made of, and `diagnostics` makes plain numbers of
# it:
#
# - `mean_cosine` of two embeddings: near 1 all point in about one direction;
# - `consistency_ratio`: near 1 no prototype tells embeddings apart, so clusters are chance;
# - `agreement`: how often two views of a node fall into the same cluster.
#
# In the warm-up there are no clusters, so only the first is there.


# %%
def train(model: Model, loss: torch.nn.Module, starts: tuple[int, ...]) -> list[dict]:
    """``starts``: the steps at which the prototypes are initialised by hand."""
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=1e-3)
    seen = []
    for step in range(STEPS):
        if step in starts:
            with torch.no_grad():
                loss.prototypes.start_from_(model(x, graph.edge_index))
        views = [model(*view_of(graph)) for _ in range(2)]
        if isinstance(loss, PGCLLoss):
            terms = loss.terms(*views)
            seen.append(diagnostics(terms))
            value = terms.loss
        else:
            value = loss(*views)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return seen


def groups_and_probe(model: Model) -> tuple[float, float]:
    """Of k-means the mutual information with the classes; the accuracy with 5 labels per class."""
    with torch.no_grad():
        units = F.normalize(model.embed(x, graph.edge_index)).numpy()
    clusters = KMeans(classes, n_init=5, random_state=0).fit_predict(units)
    few = torch.cat([(graph.y == c).nonzero()[:5, 0] for c in range(classes)])
    others = torch.ones(len(units), dtype=torch.bool).index_fill_(0, few, False).numpy()
    classifier = LogisticRegression(max_iter=1000).fit(units[few], labels[few])
    accuracy = classifier.score(units[others], labels[others])
    return 100 * normalized_mutual_info_score(labels, clusters), 100 * accuracy


# %% [markdown]
# ## Four runs
#
# 1. InfoNCE.
# 2. The paper's setting: ten random prototypes, lambda 6, from the first step.
# 3. The same, with prototypes initialised from embeddings of the untrained model.
# 4. InfoNCE for three quarters of the steps, a warm-up. At its end more prototypes are initialised
#    from embeddings, and PGCL goes on from there with a smaller lambda.

# %%
warmed_up = PGCLLoss(
    WIDTH,
    num_prototypes=graph.num_nodes // 3,
    consistency_weight=0.5,
    temperature=TAU,
    warmup_steps=3 * STEPS // 4,
)
RUNS = {
    "InfoNCE": (lambda: InfoNCE(temperature=TAU), ()),
    "paper": (lambda: PGCLLoss(WIDTH, temperature=TAU), ()),
    "paper, initialised": (lambda: PGCLLoss(WIDTH, temperature=TAU), (0,)),
    "InfoNCE, then PGCL": (lambda: warmed_up, ()),
}
history = {}
for name, (make_loss, starts) in RUNS.items():
    torch.manual_seed(0)
    model = Model(x.shape[1])
    history[name] = train(model, make_loss(), starts)
    groups, accuracy = groups_and_probe(model)
    print(f"{name:18} k-means NMI {groups:.1f}   5 labels per class {accuracy:.1f} %")

# %% [markdown]
# One synthetic graph and one seed are an example and no evidence. Here the paper's setting is far
# behind InfoNCE, and initialised prototypes mend a part of it.
# [Where PGCL helps](../where_it_helps.md) has more graphs, and more seeds.
#
# ## What the diagnostics showed
#
# No number below needs labels, so you can watch them in any training.

# %%
print("step                 mean_cosine   consistency_ratio   agreement")
for name, seen in history.items():
    for step in (0, STEPS // 2, STEPS - 1):
        if seen:
            numbers = seen[step]
            print(
                f"{step:4} {name:18} {numbers['mean_cosine']:7.2f}   "
                f"{numbers.get('consistency_ratio', nan):17.2f}   "  # nan: in the warm-up
                f"{numbers.get('agreement', nan):9.2f}"
            )

# %% The consistency ratio of the three PGCL runs: at random, initialised, and with a warm-up
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, seen in history.items():
    if seen:
        axes.plot([numbers.get("consistency_ratio", nan) for numbers in seen], label=name)
axes.axvline(warmed_up.warmup_steps, color="0.7", lw=1, zorder=0)
axes.text(warmed_up.warmup_steps - 1, 0.03, "warm-up ends", color="0.4", ha="right")
axes.set(xlabel="step", ylabel="consistency_ratio", ylim=(0, 1.05))
axes.legend(loc="lower left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# - At step 0 all embeddings point in one direction (`mean_cosine` 1), and no prototype tells them
#   apart (`consistency_ratio` 1).
# - **Random prototypes** keep it so for most of the run. The library warns of it.
# - **Initialised prototypes** tell embeddings apart early.
# - **With a warm-up** InfoNCE spreads the embeddings first. At its end the prototypes are
#   initialised, and the ratio is low at once.
# - Compare the **agreement** only between runs with equally many prototypes: 233 clusters are
#   harder to agree on than 10.
#
# ## Where to go from here
#
# - [Warm-up](../how_it_works.md#warm-up): what it counts, keeps and needs.
# - [When it goes wrong](../troubleshooting.md): what the numbers look like then.
