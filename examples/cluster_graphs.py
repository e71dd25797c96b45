"""Cluster graphs without labels: train an encoder, choose the number of clusters, draw them.

The new folder --output gets clusters.csv, with the cluster of each graph, and clusters.png, when
both are complete. Each file of --folder is a graph: a line for each edge, with the names of its two
nodes. Without --folder the graphs are the 1,797 handwritten digits of scikit-learn, which take a
minute on two cores:

    python examples/cluster_graphs.py --output clusters
    python examples/cluster_graphs.py --folder graphs --new further_graphs --output clusters
    python examples/cluster_graphs.py --graphs graphs.pt --new further.pt --output clusters

The second command reads graphs with features: lists of PyG's Data with x, edge_index and maybe a
name, a class y and positions pos, which torch.save(graphs, "graphs.pt") has written.

The files of --folder are text in UTF-8 without a header. White space or a comma separates the two
names, which contain neither. The script skips hidden files, blank lines and lines that begin with
#. Anything else in a file is an error before the training. Edges have no direction, and repeated
edges count once.
"""

import argparse
import csv
import math
import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans  # pip install -r requirements.txt
from sklearn.datasets import load_digits
from sklearn.manifold import TSNE
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, silhouette_score
from sklearn.metrics.cluster import contingency_matrix
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.utils import to_networkx, to_undirected
from tqdm import trange

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="Cluster graphs without labels.")
parser.add_argument("--output", type=Path, required=True, help="a new folder")
parser.add_argument("--folder", type=Path, help="files with edges: the graphs that train")
parser.add_argument("--graphs", type=Path, help="in its place, a file of PyG's graphs")
parser.add_argument("--new", type=Path, help="a folder or file of graphs that do not train")
parser.add_argument("--clusters", type=int, help="without it, 2 to 20 are tried")
parser.add_argument("--restarts", type=int, default=3, help="trainings, of which the best counts")
parser.add_argument("--epochs", type=int, default=20, help="0: an untrained encoder")
args = parser.parse_args()
try:
    args.output.mkdir()  # raises whatever would raise after the training
    args.output.rmdir()
except OSError as error:
    parser.error(f"--output must be a new folder that can be made, but {error}")
if args.restarts < 1 or args.epochs < 0 or (args.clusters is not None and args.clusters < 2):
    parser.error("--restarts must be 1 or more, --epochs 0 or more, and --clusters 2 or more")
if args.new and not (args.folder or args.graphs):
    parser.error("--new needs --folder or --graphs: digits have features of their own")
if args.folder and args.graphs:
    parser.error("--folder and --graphs are two ways to give the graphs: choose one")
for folder in filter(None, [args.folder, args.new]):
    if args.output.resolve().is_relative_to(folder.resolve()):
        parser.error(f"--output {args.output} must be outside of {folder}, which has the graphs")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def read(folder: Path, least: int) -> list[Data]:
    """The graphs of the files of a folder, with the same feature, 1, for each node."""
    graphs = []
    for file in sorted(folder.glob("[!.]*")):
        try:
            lines = [line.strip() for line in file.read_text("utf-8-sig").split("\n")]
        except (OSError, ValueError) as error:
            parser.error(f"{file} must be a text file in UTF-8, but {error}")
        edges = [line for line in lines if line and line[0] != "#"]
        wrong = [edge for edge in edges if not re.fullmatch(r"[^\s,]+(\s+|\s*,\s*)[^\s,]+", edge)]
        if wrong or not edges:
            expected = "two names in each line, with white space or a comma between them"
            got = repr(wrong[0][:60]) if wrong else "no edge"
            parser.error(f"{file} must have {expected}, but has {got}")
        names, index = np.unique([re.split(r"[\s,]+", edge) for edge in edges], return_inverse=True)
        edge_index = to_undirected(torch.from_numpy(index.reshape(-1, 2).T))
        graphs.append(Data(x=torch.ones(len(names), 1), edge_index=edge_index, name=file.name))
    if len(graphs) < least:
        parser.error(f"{folder} must be a folder of {least} files or more, but has {len(graphs)}")
    return graphs


def load(file: Path, least: int) -> list[Data]:
    """The graphs of a file that torch.save has written."""
    torch.serialization.add_safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage])
    graphs = []
    try:
        for number, graph in enumerate(torch.load(file, weights_only=True)):
            y = None if graph.y is None else int(graph.y)
            pos = graph.pos if graph.pos is not None and graph.pos.shape[1] == 2 else None
            others = {"pos": pos, "y": y, "name": graph.get("name", number)}
            graphs.append(Data(x=graph.x.float(), edge_index=graph.edge_index, **others))
            graphs[-1].validate()  # nodes of edges exist
            if graph.x.dim() != 2 or not graph.x.isfinite().all():
                raise ValueError("x must be finite and [N, F]")
    except Exception as error:  # whatever the file is
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        expected = "a list of PyG's Data with x and edge_index, written by torch.save"
        parser.error(f"{file} must be {expected}, but {what}")
    if len(graphs) < least:
        parser.error(f"{file} must be a list of {least} graphs or more, but has {len(graphs)}")
    if len({graph.num_features for graph in graphs}) > 1:
        parser.error(f"{file} must be a list of graphs with the same number of features")
    return graphs


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
        x = self.gin(batch.x, batch.edge_index)
        return global_add_pool(x, batch.batch, batch.num_graphs)  # [N, 96]


def train(seed):
    torch.manual_seed(seed)
    encoder, loss_of = Encoder(), PGCLLoss(96, temperature=0.2, consistency_weight=1)
    projected = torch.nn.Sequential(encoder, MLP([96, 96, 96], norm=None))
    model = ContrastiveModel(projected, NodeDrop(0.2), EdgePerturb(0.2), loss_of).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    # Equal batches of at most 128: the step of a small last one would count like the others.
    size = math.ceil(len(graphs) / math.ceil(len(graphs) / 128))
    for _ in trange(args.epochs, desc=f"training {seed}", unit="epoch"):
        for batch in DataLoader(graphs, size, shuffle=True):
            loss = model(batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return encoder.eval()


@torch.no_grad()
def embed(encoder, graphs):
    return torch.cat([encoder(x.to(device)).cpu() for x in DataLoader(graphs, 256)]).numpy()


def count_different(graphs: list[Data], most: int) -> int:
    """Graphs that the three layers of the encoder can tell apart; the count ends at ``most``."""
    hashes: set[str] = set()
    for graph in graphs:
        network = to_networkx(graph, node_attrs=["x"], to_undirected=True)
        hashes.add(nx.weisfeiler_lehman_graph_hash(network, node_attr="x", iterations=3))
        if len(hashes) == most:
            break
    return len(hashes)


def cluster(z, seed):
    """k-means with the number of clusters that has the highest silhouette, and the silhouette."""
    scores = {}
    for number in [args.clusters] if args.clusters else range(2, most + 1):
        kmeans = KMeans(number, n_init=10, random_state=seed).fit(z)
        sample, labels = np.random.default_rng(seed).permutation(len(z))[:1000], kmeans.labels_
        if scores and len(np.unique(labels)) < number:
            break  # no more embeddings differ
        is_defined = 1 < len(np.unique(labels[sample])) < len(sample)
        scores[kmeans] = silhouette_score(z[sample], labels[sample]) if is_defined else -1.0
    return max(scores.items(), key=lambda item: item[1])


def describe(z, kmeans, silhouette, labels):
    """Print sizes, warnings, and how well clusters and classes agree, if there are labels."""
    clusters, sizes = kmeans.labels_, np.bincount(kmeans.labels_, minlength=kmeans.n_clusters)
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
    """All embeddings by t-SNE, and the six graphs nearest to each of the first 100 centres."""
    number, colours = min(kmeans.n_clusters, 100), plt.get_cmap("tab20")
    figure = plt.figure(figsize=(14, max(7, 0.6 * number)), layout="constrained")
    left, right = figure.subfigures(1, 2)
    tsne = TSNE(2, perplexity=min(30, len(z) / 3), init="random", random_state=0)
    flat = tsne.fit_transform(np.concatenate([z, kmeans.cluster_centers_]))
    axes = left.subplots()
    axes.scatter(*flat[: len(z)].T, c=colours(kmeans.labels_), s=6)
    axes.scatter(*flat[len(z) :].T, marker="*", s=200, c="black", edgecolors="white")
    axes.axis("off")
    nearest = kmeans.transform(z).argsort(0)[:6, :number].T  # [clusters, 6]
    panels = right.subplots(*nearest.shape, squeeze=False)
    for (row, column), index in np.ndenumerate(nearest):
        network, axes = to_networkx(graphs[index], to_undirected=True), panels[row, column]
        pos = graphs[index].pos
        # The better a layout is, the slower: Kamada-Kawai takes minutes for 1,000 nodes.
        layouts = nx.kamada_kawai_layout, nx.spring_layout, nx.random_layout
        layout_of = layouts[np.searchsorted([100, 1000], len(network))]
        layout = layout_of(network) if pos is None else dict(enumerate(pos.numpy()))
        style = {"node_size": 6, "node_color": [colours(row)], "edge_color": "silver"}
        nx.draw(network, layout, axes, **style)
        axes.set_aspect("equal")
        axes.set_title("" if column else f"cluster {row}", fontsize=8)
    figure.savefig(file, dpi=120)


reader = load if args.graphs else read
if args.folder or args.graphs:
    graphs = reader(args.graphs or args.folder, least=3)
else:
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16).float()
    graphs = [*map(graph_of_digit, range(len(images)), images, digits.target.tolist())]
every = [graphs, reader(args.new, least=1)] if args.new else [graphs]
if every[-1][0].num_features != graphs[0].num_features:
    parser.error(
        f"--new must be graphs with {graphs[0].num_features} features, as those that train, but "
        f"has {every[-1][0].num_features}"
    )
different = count_different(graphs, args.clusters or 20)
most = min(different, len(graphs) - 1)
if most < (args.clusters or 2):
    reason = f"the encoder can tell {different} of {len(graphs)} graphs apart"
    if most < different:
        reason = f"there are {len(graphs)} graphs"
    parser.error(f"at most {most} clusters are possible, because {reason}")
best, numbers = -2.0, []
for seed in range(args.restarts):
    encoder = train(seed)
    scaler = make_pipeline(StandardScaler(), Normalizer())
    z = scaler.fit_transform(embed(encoder, graphs))
    kmeans, silhouette = cluster(z, seed)
    print(f"training {seed}: {kmeans.n_clusters} clusters, silhouette {silhouette:.3f}")
    numbers.append(kmeans.n_clusters)
    if silhouette > best:
        best, chosen = silhouette, (encoder, scaler, z, kmeans)
if max(numbers) > 2 * min(numbers):
    print("Warning: the trainings disagree about the number of clusters, which --clusters sets")
encoder, scaler, z, kmeans = chosen
labels = [int(graph.y) for graph in graphs if graph.y is not None]
describe(z, kmeans, best, labels if len(labels) == len(graphs) else [])
with TemporaryDirectory(dir=args.output.parent, prefix="unfinished_") as temporary:
    results = Path(temporary) / "results"
    results.mkdir()
    table = results / "clusters.csv"
    with table.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["graph", "trained", "cluster", "distance"])
        for some in every:
            distances = kmeans.transform(scaler.transform(embed(encoder, some)))  # [N, clusters]
            for graph, row in zip(some, distances, strict=True):
                writer.writerow([graph.name, some is graphs, row.argmin(), f"{row.min():.3f}"])
    draw(z, kmeans, results / "clusters.png")
    while os.path.lexists(args.output):  # something else was put there during the training
        args.output = args.output.with_name(f"{args.output.name}_new")
    results.rename(args.output)
print(f"clusters.csv and clusters.png are in {args.output}")
