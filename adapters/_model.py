"""ContrastiveModel, which needs no framework."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class ContrastiveModel(nn.Module):
    """Computes the loss of a batch: augments it twice, encodes both views, and compares them.

    ``model(batch)`` is ``loss(encoder(augment1(batch)), encoder(augment2(batch)))``. What the loss
    is called with by name is given after the batch, as in ``model(batch, labels=batch.y)``.

    The encoder is called with the view alone, a ``Batch`` of PyG or a batched ``DGLGraph``. Wrap an
    encoder that takes other arguments in a small module, as in the example. A lambda also works,
    but ``model.parameters()`` does not contain the parameters that it uses.

    The encoder usually returns one embedding for each graph. Embeddings of nodes need augmentations
    that keep all nodes, such as ``EdgeDrop`` and ``FeatureMask``.

    Args:
        encoder: a module that returns embeddings ``[N, D]`` of a view.
        augment1, augment2: callables that return a view of a batch, and leave the batch unchanged.
            ``torch.nn.Identity()`` stands for no augmentation.
        loss: a callable of the embeddings of both views, such as :class:`pgcl_losses.PGCLLoss`. If
            it is a module, ``model.parameters()`` contains its parameters.

    Examples:
        >>> import torch
        >>> from torch_geometric.data import Batch, Data
        >>> from torch_geometric.nn import GIN, global_add_pool
        >>> from pgcl_losses import PGCLLoss
        >>> from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop
        >>> class Encoder(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gin = GIN(3, 16, num_layers=2)
        ...     def forward(self, view):
        ...         nodes = self.gin(view.x, view.edge_index)
        ...         return global_add_pool(nodes, view.batch, size=view.num_graphs)
        >>> model = ContrastiveModel(Encoder(), NodeDrop(), EdgePerturb(), PGCLLoss(dim=16))
        >>> path = Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]))
        >>> model(Batch.from_data_list([path] * 8)).backward()

    """

    def __init__(
        self,
        encoder: Callable[[Any], Tensor],
        augment1: Callable[[Any], Any],
        augment2: Callable[[Any], Any],
        loss: Callable[..., Tensor],
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.augment1 = augment1
        self.augment2 = augment2
        self.loss = loss

    def forward(self, batch: Any, **given: Any) -> Tensor:
        """Compute the loss of a batch; ``given`` is for the loss, such as ``labels=batch.y``."""
        z1 = self.encoder(self.augment1(batch))
        z2 = self.encoder(self.augment2(batch))
        return self.loss(z1, z2, **given)
