"""A graph encoder trained without labels: the paper's encoder, the losses, the loop."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

from pgcl_losses import Batch as Embeddings
from pgcl_losses import InfoNCE, PGCLLoss, SinkhornPrototypes
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

LAYERS, WIDTH = 3, 32
DIM = LAYERS * WIDTH
UNTRAINED, INFO_NCE, GRAPH_CL, PGCL = "untrained GIN", "InfoNCE", "GraphCL's own loss", "PGCL"
UNIFORM = {"weighting": "uniform", "exclude_same_cluster": False}
SAMPLE = {"weighting": "sample", "exclude_same_cluster": False}
CONTRAST_ALONE = {"consistency_weight": 0.0}
ABLATION: dict[str, dict[str, Any]] = {  # options of `PGCLLoss`
    "consistency alone": {"contrast_weight": 0.0},
    "sample-reweighted": SAMPLE | CONTRAST_ALONE,
    "prototype-reweighted": CONTRAST_ALONE,
    "InfoNCE + consistency": UNIFORM,
    "sample-reweighted + consistency": SAMPLE,
    PGCL: {},
}
# The paper's options but for the learning rate, the fraction dropped and the frozen first epoch.
SETTING: dict[str, Any] = {
    "temperature": 0.2,
    "num_prototypes": 10,
    "consistency_weight": 6.0,
    "freeze_epochs": 1,
    "batch_size": 128,
    "epochs": 20,
    "drop": 0.2,
    "perturb": 0.2,
    "lr": 0.01,
}
OF_PROTOTYPES = ("num_prototypes", "consistency_weight", "freeze_epochs")
PLAIN, CENTRED, BALANCED = "plain", "centred", "balanced"  # predictions of PGCL


class GIN(nn.Module):
    """Batch of G graphs -> embeddings ``[G, 96]``, the concatenation of all layers."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        widths = [num_features, *[WIDTH] * LAYERS]
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
            for width in widths[:-1]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.convs)

    def forward(self, batch: Batch) -> Tensor:
        x, layers = batch.x, []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, batch.edge_index).relu())
            layers.append(global_add_pool(x, batch.batch, batch.num_graphs))
        return torch.cat(layers, dim=1)


class Projected(nn.Module):
    """The encoder with a projection head, which only the loss uses."""

    def __init__(self, encoder: GIN) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.encoder(batch))


def centre(prototypes: SinkhornPrototypes, given: tuple[Any, ...], batch: Embeddings) -> Embeddings:
    """A forward hook: the logits of predictions get mean 0 over each view, for each prototype."""
    of_views = batch.views(batch.log_probs)  # [V, N, K]
    centred = (of_views - of_views.mean(1, keepdim=True)).log_softmax(-1)
    return batch._replace(log_probs=centred.view_as(batch.log_probs))


def pgcl_of(dim: int, num_prototypes: int, predictions: str = PLAIN, **options: Any) -> PGCLLoss:
    """PGCL whose predictions are plain, centred or balanced over each view."""
    is_balanced = predictions == BALANCED
    pgcl = PGCLLoss(dim, num_prototypes, balance_predictions=is_balanced, **options)
    if predictions == CENTRED:
        pgcl.prototypes.register_forward_hook(centre)
    return pgcl


def options_of(row: str, setting: dict[str, Any]) -> dict[str, Any]:
    """The options of a row; losses without prototypes omit theirs."""
    if row == UNTRAINED:
        return {"row": row}
    has_none = row in (INFO_NCE, GRAPH_CL)
    options = {k: v for k, v in setting.items() if not has_none or k not in OF_PROTOTYPES}
    return {"row": row, **options}


def loss_of(config: dict[str, Any], batches: int) -> InfoNCE | PGCLLoss:
    """The loss of a row, for so many batches an epoch.

    torch's generator is left as it is: all losses of one seed get the same batches and views.
    """
    temperature = config["temperature"]
    if config["row"] == INFO_NCE:
        return InfoNCE(temperature=temperature)
    if config["row"] == GRAPH_CL:
        return InfoNCE.like("GraphCL", temperature=temperature)
    options = {"consistency_weight": config["consistency_weight"], **ABLATION[config["row"]]}
    options["freeze_steps"] = config["freeze_epochs"] * batches
    predictions = config.get("predictions", PLAIN)
    with torch.random.fork_rng(devices=[]):
        return pgcl_of(
            DIM, config["num_prototypes"], predictions, temperature=temperature, **options
        )


def build(config: dict[str, Any], encoder: GIN, batches: int) -> ContrastiveModel:
    """The encoder with a new head, two augmentations and the loss of the row."""
    augments = NodeDrop(config["drop"]), EdgePerturb(config["perturb"])
    return ContrastiveModel(Projected(encoder), *augments, loss_of(config, batches))


def train(
    model: ContrastiveModel,
    loader: Iterable[Data],
    config: dict[str, Any],
    given: Callable[[Data], dict[str, Any]] = lambda batch: {},
) -> None:
    """Train for all epochs. ``given``: what the loss is called with for a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    model.train()
    for _ in range(config["epochs"]):
        for batch in loader:
            loss = model(batch, **given(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def batches_of(graphs: Sequence[Data], most: int) -> DataLoader:
    """Shuffled batches of equal size, as few as there are of at most ``most`` graphs.

    A small last batch would have few negatives, and its step would count as much as any other.
    """
    count = math.ceil(len(graphs) / most)
    return DataLoader(graphs, math.ceil(len(graphs) / count), shuffle=True)


def trained(config: dict[str, Any], graphs: list[Data]) -> ContrastiveModel:
    """A new model of this row and seed after all epochs; an untrained one has InfoNCE's loss."""
    torch.manual_seed(config["seed"])
    encoder = GIN(graphs[0].num_node_features)
    if config["row"] == UNTRAINED:
        config = SETTING | {"row": INFO_NCE, "epochs": 0}
    loader = batches_of(graphs, config["batch_size"])
    model = build(config, encoder, len(loader))
    train(model, loader, config)
    return model


@torch.no_grad()
def embed(encoder: nn.Module, graphs: list[Data]) -> np.ndarray:
    """``[G, 96]``. It draws no random number, so that evaluation does not change the training."""
    encoder.eval()
    embeddings = []
    for start in range(0, len(graphs), 128):
        embeddings.append(encoder(Batch.from_data_list(graphs[start : start + 128])))
    return torch.cat(embeddings).numpy()
