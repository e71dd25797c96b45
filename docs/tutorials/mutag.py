# %% [markdown]
# # MUTAG from raw files to a probe
#
# MUTAG is a set of 188 molecules in two classes. Here a graph encoder learns from them without
# labels, once with InfoNCE and once with PGCL. Then a linear classifier, the *probe*, shows how
# well the encoder's rows tell the classes apart.
#
# You need `torch-geometric`, `scikit-learn` and `matplotlib`. It takes a quarter of a minute on
# one core.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    RandomChoice,
    Subgraph,
)

# %% [markdown]
# ## The raw files
#
# With `FOLDER = None` nothing is downloaded: the next cells make molecules and write them as
# files. To use MUTAG itself, name a folder that has `MUTAG/raw/MUTAG_A.txt` and its other
# files. Or name any folder and set `DOWNLOAD = True`: then PyG downloads MUTAG into it.

# %%
FOLDER = None  # or "data"
DOWNLOAD = False

# %% [markdown]
# Sets of this collection (TU) are text files. `A` has an edge on each line, `graph_indicator`
# the graph of each node, `graph_labels` the class of each graph, and `node_labels` the atom of
# each node.
#
# The made molecules have a ring of six carbon atoms with branches, two nitrogen atoms and four
# oxygen atoms. In class 1 an oxygen atom hangs on nitrogen in 7 cases of 10, in class 0 in 3.

# %%
CARBON, NITROGEN, OXYGEN = range(3)


def made_molecule(label: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Atoms, and the bonds between them."""
    atoms = [CARBON] * int(torch.randint(8, 16, ())) + [NITROGEN] * 2
    bonds = [(atom, (atom + 1) % 6) for atom in range(6)]
    bonds += [(int(torch.randint(atom, ())), atom) for atom in range(6, len(atoms))]
    for _ in range(4):
        on_nitrogen = torch.rand(()) < (0.7 if label == 1 else 0.3)
        neighbours = [i for i, atom in enumerate(atoms) if (atom == NITROGEN) == on_nitrogen]
        bonds.append((neighbours[int(torch.randint(len(neighbours), ()))], len(atoms)))
        atoms.append(OXYGEN)
    return atoms, bonds


def write_made_set(folder: Path, graphs: int) -> None:
    lines: dict[str, list[str]] = {
        "A": [], "graph_indicator": [], "graph_labels": [], "node_labels": [],
    }  # fmt: skip
    for graph in range(1, graphs + 1):
        label = graph % 2
        atoms, bonds = made_molecule(label)
        first = len(lines["node_labels"]) + 1  # nodes are counted from 1
        for a, b in bonds:
            lines["A"] += [f"{first + a}, {first + b}", f"{first + b}, {first + a}"]
        lines["graph_indicator"] += [str(graph)] * len(atoms)
        lines["node_labels"] += [str(atom) for atom in atoms]
        lines["graph_labels"].append(str(label))
    folder.mkdir(parents=True)
    for part, written in lines.items():
        (folder / f"{folder.parent.name}_{part}.txt").write_text("\n".join(written) + "\n")


torch.manual_seed(0)
if FOLDER is None:
    root, name = Path(tempfile.mkdtemp()), "MADE"
    write_made_set(root / name / "raw", graphs=188)
else:
    root, name = Path(FOLDER), "MUTAG"
    if not DOWNLOAD and not (root / name / "raw" / "MUTAG_A.txt").is_file():
        raise FileNotFoundError(f"{root} has no MUTAG/raw/MUTAG_A.txt, and DOWNLOAD is False")

graphs = TUDataset(str(root), name)
labels = torch.cat([graph.y for graph in graphs]).numpy()
nodes = sum(graph.num_nodes for graph in graphs) / len(graphs)
print(f"{name}: {len(graphs)} graphs, {nodes:.1f} nodes each, {graphs.num_features} kinds of atoms")
print("graphs of each class:", torch.bincount(torch.from_numpy(labels)).tolist())

# %% [markdown]
# ## Encoder and views
#
# The encoder is a GIN of three layers. It gives a row for each node, and these are added up for
# each graph. What goes to the loss comes from a small *projection head* behind it. After training
# the head is not needed: classifiers get the encoder's rows.
#
# A view of a batch leaves out nodes, moves edges, hides atoms or keeps a connected part.


# %%
class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gin = GIN(graphs.num_features, WIDTH, num_layers=3, norm="batch_norm", jk="cat")
        self.head = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
        )

    def embed(self, batch: Batch) -> torch.Tensor:
        return global_add_pool(self.gin(batch.x, batch.edge_index), batch.batch, batch.num_graphs)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.head(self.embed(batch))


WIDTH, BATCH, EPOCHS = 32, 64, 20
whole: Data = Batch.from_data_list(list(graphs))  # small enough to be one batch
augment = RandomChoice([NodeDrop(), EdgePerturb(), AttributeMask(), Subgraph()])

# %% [markdown]
# ## Training
#
# InfoNCE has a temperature and nothing else to set. PGCL begins with a warm-up, here of three
# quarters of the steps, in which it is InfoNCE. At its end the prototypes are initialised from
# embeddings. Both share one loop.


# %%
def train(model: Model, loss: torch.nn.Module, loader: DataLoader) -> None:
    contrast = ContrastiveModel(model, augment, augment, loss)
    # The parameters of the model and of the loss: the prototypes are learned.
    optimizer = torch.optim.Adam(contrast.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        contrast.train()
        for batch in loader:
            optimizer.zero_grad()
            contrast(batch).backward()
            optimizer.step()


# %% [markdown]
# ## The probe
#
# The probe is a logistic regression on the encoder's rows, in ten folds. It alone sees labels.


# %%
@torch.no_grad()
def rows_of(model: Model) -> torch.Tensor:
    model.eval()  # batch normalisation by what it has seen in training
    return model.embed(whole).numpy()


def probe(rows: torch.Tensor) -> float:
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return 100 * cross_val_score(classifier, rows, labels, cv=10).mean()


def trained(kind: str, seed: int) -> Model:
    torch.manual_seed(seed)
    model = Model()
    loader = DataLoader(graphs, BATCH, shuffle=True)
    if kind == "InfoNCE":
        train(model, InfoNCE(), loader)
    if kind == "PGCL":
        warmup_steps = 3 * EPOCHS * len(loader) // 4
        pgcl = PGCLLoss(WIDTH, BATCH // 3, consistency_weight=1, warmup_steps=warmup_steps)
        train(model, pgcl, loader)
    return model


KINDS, SEEDS = ("no training", "InfoNCE", "PGCL"), range(3)
rows = {kind: [rows_of(trained(kind, seed)) for seed in SEEDS] for kind in KINDS}
for kind in KINDS:
    accuracies = [probe(of_seed) for of_seed in rows[kind]]
    mean = sum(accuracies) / len(accuracies)
    each = ", ".join(f"{accuracy:.1f}" for accuracy in accuracies)
    print(f"{kind:12} {mean:.1f} %   seeds: {each}")

# %% [markdown]
# Look at the spread over seeds before you compare: here the means differ by less. On MUTAG itself
# InfoNCE and PGCL do not differ significantly either, with five seeds: [where PGCL
# helps](../where_it_helps.md) has the numbers.
#
# ## A look at the rows
#
# The two directions in which the rows of the first seed vary most:

# %% Rows of the graphs, coloured by class: without training, by InfoNCE and by PGCL
figure, panels = plt.subplots(1, len(KINDS), figsize=(9, 3), layout="constrained")
for axes, kind in zip(panels, KINDS, strict=True):
    flat = PCA(2).fit_transform(StandardScaler().fit_transform(rows[kind][0]))
    for label in (0, 1):
        axes.scatter(*flat[labels == label].T, s=12, label=f"class {label}")
    axes.set(title=kind, xticks=[], yticks=[])
panels[0].legend()
plt.show()

# %% [markdown]
# ## Where to go from here
#
# - [After training](../after_training.md): save the encoder, embed new graphs, export it.
# - [Swap it into your pipeline](../swap.md): the same for a script that you have already.
