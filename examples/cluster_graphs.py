"""Cluster graphs without labels: train an encoder, choose the number of clusters, draw them.

The new folder --output gets clusters.csv, with the cluster of each graph, and clusters.png. Each
file of --folder is a graph: a line for each edge, with the names of its two nodes. Without --folder
the graphs are the 1,797 handwritten digits of scikit-learn, which take a minute on two cores:

    python examples/cluster_graphs.py --output clusters
    python examples/cluster_graphs.py --folder graphs --new further_graphs --output clusters
"""

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans  # pip install -e '.[experiments]'
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sklearn.metrics.cluster import contingency_matrix
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.utils import to_networkx, to_undirected
from tqdm import trange

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="Cluster graphs without labels.")
parser.add_argument("--output", type=Path, required=True, help="a new folder")
parser.add_argument("--folder", type=Path, help="files with edges: the graphs that train")
parser.add_argument("--new", type=Path, help="files with edges: graphs that do not train")
parser.add_argument("--clusters", type=int, help="without it, 2 to 20 are tried")
parser.add_argument("--restarts", type=int, default=3, help="trainings, of which the best counts")
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()
if args.output.exists() or not args.output.parent.is_dir():
    parser.error(f"--output must be a new folder in an existing one, but it is {args.output}")
if args.restarts < 1 or args.epochs < 0 or (args.clusters is not None and args.clusters < 2):
    parser.error("--restarts must be 1 or more, --epochs 0 or more, and --clusters 2 or more")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read(folder, least):
    """The graphs of a folder, with a line for each edge in each file."""
    graphs = [graph_of_file(file) for file in sorted(folder.glob("[!.]*"))]
    if len(graphs) < least:
        parser.error(f"{folder} must have {least} files or more, but has {len(graphs)}")
    return graphs


def graph_of_file(file):
    edges = np.loadtxt(file.read_text().replace(",", " ").splitlines(), dtype=str, ndmin=2)
    names, index = np.unique(edges[:, :2], return_inverse=True)
    edge_index = to_undirected(torch.from_numpy(index.reshape(-1, 2).T))
    return Data(x=torch.ones(len(names), 1), edge_index=edge_index, name=file.name)


def graph_of_digit(number, image, digit):
    where = (image > 0.2).nonzero()  # [V, 2] the bright pixels
    edges = ((where[:, None] - where).abs().amax(2) == 1).nonzero().T  # pixels that touch
    x = torch.cat([image[tuple(where.T)][:, None], (where - where.float().mean(0)) / 8], 1)
    pos = where.flip(1) * torch.tensor([1, -1])
    return Data(x=x, edge_index=edges, y=digit, pos=pos, name=number)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gin = GIN(graphs[0].num_features, 32, num_layers=3, norm="batch_norm", jk="cat")
        self.gin.lin = torch.nn.Identity()  # keep the embeddings of all three layers

    def forward(self, batch):
        return global_add_pool(self.gin(batch.x, batch.edge_index), batch.batch)  # [N, 96]


def train(seed):
    torch.manual_seed(seed)
    encoder, loss_of = Encoder(), PGCLLoss(96, temperature=0.2, consistency_weight=1)
    projected = torch.nn.Sequential(encoder, MLP([96, 96, 96], norm=None))
    model = ContrastiveModel(projected, NodeDrop(0.2), EdgePerturb(0.2), loss_of).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in trange(args.epochs, desc=f"training {seed}", unit="epoch"):
        for batch in DataLoader(graphs, batch_size=128, shuffle=True):
            loss = model(batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return encoder.eval()


@torch.no_grad()
def embed(encoder, graphs):
    return torch.cat([encoder(x.to(device)).cpu() for x in DataLoader(graphs, 256)]).numpy()


def cluster(z, seed):
    """k-means with the number of clusters that has the highest silhouette, and the silhouette."""
    scores = {}
    for number in [args.clusters] if args.clusters else range(2, min(21, len(z))):
        kmeans = KMeans(number, n_init=10, random_state=seed).fit(z)
        sample, labels = np.random.default_rng(seed).permutation(len(z))[:1000], kmeans.labels_
        several = len(np.unique(labels[sample])) > 1
        scores[kmeans] = silhouette_score(z[sample], labels[sample]) if several else -1.0
    return max(scores.items(), key=lambda item: item[1])


def describe(z, clusters, silhouette, labels):
    """Print sizes, warnings, and how well clusters and classes agree, if there are labels."""
    sizes = np.bincount(clusters)
    print(f"{len(sizes)} clusters of", *sorted(sizes.tolist(), reverse=True), "graphs")
    if sizes.max() > 0.9 * len(z):
        print(f"Warning: one cluster has {sizes.max()} of {len(z)} graphs")
    if silhouette < 0.1:
        print(f"Warning: the clusters overlap; their silhouette is {silhouette:.2f}")
    if labels:
        counts = contingency_matrix(labels, clusters)  # [classes, clusters]
        # Each class is one cluster, as well as this is possible.
        accuracy = counts[linear_sum_assignment(counts, maximize=True)].sum() / len(labels)
        nmi = normalized_mutual_info_score(labels, clusters)
        ari = adjusted_rand_score(labels, clusters)
        print(f"Labels: NMI {nmi:.3f}, ARI {ari:.3f}, accuracy {accuracy:.3f}")


def draw(z, kmeans, file):
    """All embeddings by t-SNE, and of each cluster the six graphs nearest to its centre."""
    number, colours = kmeans.n_clusters, plt.get_cmap("tab20")
    figure = plt.figure(figsize=(14, max(7, 0.6 * number)), layout="constrained")
    left, right = figure.subfigures(1, 2)
    tsne = TSNE(2, perplexity=min(30, len(z) / 3), init="random", random_state=0)
    flat = tsne.fit_transform(np.concatenate([z, kmeans.cluster_centers_]))
    axes = left.subplots()
    axes.scatter(*flat[: len(z)].T, c=colours(kmeans.labels_), s=6)
    axes.scatter(*flat[len(z) :].T, marker="*", s=200, c="black", edgecolors="white")
    axes.axis("off")
    nearest = kmeans.transform(z).argsort(0)[:6].T  # [clusters, 6]
    panels = right.subplots(*nearest.shape, squeeze=False)
    for (row, column), index in np.ndenumerate(nearest):
        network, axes = to_networkx(graphs[index], to_undirected=True), panels[row, column]
        pos = graphs[index].pos
        layout = nx.kamada_kawai_layout(network) if pos is None else dict(enumerate(pos.numpy()))
        style = {"node_size": 6, "node_color": [colours(row)], "edge_color": "silver"}
        nx.draw(network, layout, axes, **style)
        axes.set_aspect("equal")
    figure.savefig(file, dpi=120)


if args.folder:
    graphs = read(args.folder, least=3)  # or any list of PyG's graphs, with x, edge_index and name
else:
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float()
    graphs = [*map(graph_of_digit, range(len(images)), images, digits.target.tolist())]
every = [graphs, read(args.new, least=1)] if args.new else [graphs]
best = -2.0
for seed in range(args.restarts):
    encoder = train(seed)
    scaler = make_pipeline(StandardScaler(), Normalizer())
    z = scaler.fit_transform(embed(encoder, graphs))
    kmeans, silhouette = cluster(z, seed)
    print(f"training {seed}: {kmeans.n_clusters} clusters, silhouette {silhouette:.3f}")
    if silhouette > best:
        best, chosen = silhouette, (encoder, scaler, z, kmeans)
encoder, scaler, z, kmeans = chosen
labels = [int(graph.y) for graph in graphs if graph.y is not None]
describe(z, kmeans.labels_, best, labels if len(labels) == len(graphs) else [])
args.output.mkdir()
with (args.output / "clusters.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["graph", "trained", "cluster", "distance"])
    for some in every:
        distances = kmeans.transform(scaler.transform(embed(encoder, some)))  # [graphs, clusters]
        for graph, row in zip(some, distances, strict=True):
            writer.writerow([graph.name, some is graphs, row.argmin(), f"{row.min():.3f}"])
draw(z, kmeans, args.output / "clusters.png")
print(f"clusters.csv and clusters.png are in {args.output}")
