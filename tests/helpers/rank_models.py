"""An encoder and a loss on each rank: alike for a seed, their gradients, and what they send."""

import torch
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pgcl_losses import PGCLLoss

DIM = 4


def of_seed(seed):
    return torch.Generator().manual_seed(seed)


def model_of(seed, **options):
    """An encoder and a loss, alike for the same seed."""
    torch.manual_seed(seed)
    encoder = nn.Linear(3, DIM, dtype=torch.float64)
    return encoder, PGCLLoss(DIM, **{"num_prototypes": 3, **options}).double()


class Inside(nn.Module):
    """Encoder and loss in one module."""

    def __init__(self, encoder, pgcl):
        super().__init__()
        self.encoder, self.pgcl = encoder, pgcl

    def forward(self, x1, x2):
        return self.pgcl(self.encoder(x1), self.encoder(x2))


def gradients(*modules):
    return [parameter.grad for module in modules for parameter in module.parameters()]


def mean_over_ranks(value):
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


class SentBytes(TorchDispatchMode):
    """What collectives hand over, by name: a ring sends it on from rank to rank."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = str(function).split(".")[1].strip("_")
            # all-gather takes (output, input, ...)
            tensors = args[1] if name.endswith("base") else args[0][0]
            self.given[name] = self.given.get(name, 0) + tensors.nbytes
        return function(*args, **(kwargs or {}))
