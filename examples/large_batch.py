"""One loss over a batch larger than the encoder's memory, as in GradCache (Gao et al., 2021).

    torchrun --nproc-per-node=2 examples/large_batch.py  # or python, on one process

The encoder runs twice on each chunk, and stores the activations of one chunk at a time.
"""

import argparse
import os

import torch
from torch.utils.checkpoint import checkpoint
from torch_geometric import seed_everything  # pip install -e '.[experiments]'
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import EdgePerturb, NodeDrop


def encode_in_chunks(encoder, chunks):
    """As torch.cat([encoder(*chunk) for chunk in chunks]), with the activations of one chunk."""
    return torch.cat([checkpoint(encoder, *chunk, use_reentrant=False) for chunk in chunks])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gin, self.pgcl = GIN(8, 64, num_layers=3, out_channels=32, dropout=0.1), PGCLLoss(32)

    def encode(self, x, edge_index, batch, num_graphs):
        return global_add_pool(self.gin(x, edge_index), batch, num_graphs)

    def forward(self, *views):
        views = [[(v.x, v.edge_index, v.batch, v.num_graphs) for v in chunks] for chunks in views]
        return self.pgcl(*(encode_in_chunks(self.encode, chunks) for chunks in views))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One loss over all graphs, encoded in chunks.")
    for name, default in {"graphs": 1024, "chunk": 64, "epochs": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args, rank = parser.parse_args(), int(os.environ.get("LOCAL_RANK", -1))  # of torchrun
    device = torch.device("cuda", max(rank, 0)) if torch.cuda.is_available() else "cpu"
    seed_everything(1 + rank)
    model, augmentations = Model().to(device), (NodeDrop(), EdgePerturb())
    if rank >= 0:
        torch.distributed.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(FakeDataset(args.graphs, 20, num_channels=8), args.chunk)
    for epoch in range(1, args.epochs + 1):
        loss = model(*([augment(data.to(device)) for data in loader] for augment in augmentations))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"Epoch: {epoch:03d}, Loss: {loss.item():.4f}", flush=True)
    if rank >= 0:
        del model  # it keeps threads of gloo running, which can abort Python's exit
        torch.distributed.destroy_process_group()
