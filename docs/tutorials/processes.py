# %% [markdown]
# # Many processes
#
# Train on several processes with the loss of one. A contrastive loss compares all embeddings of a
# batch, and its value changes if each process sees only its own. `PGCLLoss` gathers the
# embeddings: value and gradients are those of one process with the complete batch. This tutorial
# compares two processes with one.
#
# You need `matplotlib`, and Linux or macOS. It takes a few seconds.

# %%
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import PGCLLoss

torch.set_num_threads(1)

# %% [markdown]
# ## Data and model
#
# Vectors in twelve clusters stand for graphs, and an MLP for their encoder. The loss is a submodule
# of the model: `DistributedDataParallel` synchronises its prototypes.

# %%
FEATURES, DIM, BATCH, STEPS = 16, 32, 96, 60

torch.manual_seed(0)
clusters = torch.arange(BATCH) % 12
graphs = torch.randn(12, FEATURES)[clusters] + 0.5 * torch.randn(BATCH, FEATURES)
views = graphs + 0.5 * torch.randn(STEPS, 2, BATCH, FEATURES)  # two views for each step


class Model(torch.nn.Module):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, DIM)
        )
        self.pgcl = PGCLLoss(DIM, BATCH // 3, consistency_weight=1, gather=gather)

    def forward(self, view1: torch.Tensor, view2: torch.Tensor) -> torch.Tensor:
        return self.pgcl(self.encoder(view1), self.encoder(view2))


# %% [markdown]
# ## One training for any number of processes
#
# Each process trains on its own slice of both views and calls the loss equally often.


# %%
def train(own: slice, wrap: bool, gather: bool = True) -> tuple[list[float], torch.Tensor]:
    """The losses of all steps, and the prototypes at the end."""
    torch.manual_seed(1)
    model = Model(gather)
    pgcl = model.pgcl
    loss_of = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for view1, view2 in views[:, :, own]:
        loss = loss_of(view1, view2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, pgcl.prototypes.weight.detach().clone()


# %% [markdown]
# ## Two processes
#
# The batches may differ in size: one process has 64 of the 96 graphs, the other 32. They use the
# `gloo` backend.
#
# The processes are forks of this one, because `torchrun` cannot start a notebook. For your own
# training use `torchrun`, as in [examples/distributed.py](../../examples/distributed.py).


# %%
def of_rank(rank: int, file: str, gather: bool) -> tuple[list[float], torch.Tensor]:
    distributed.init_process_group(
        "gloo", f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    own = (slice(0, 64), slice(64, BATCH))[rank]
    result = train(own, wrap=True, gather=gather)
    distributed.destroy_process_group()
    return result


def two_processes(gather: bool) -> list[tuple[list[float], torch.Tensor]]:
    file = str(Path(tempfile.mkdtemp()) / "rendezvous")
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(of_rank, (0, 1), (file,) * 2, (gather,) * 2))


first, second = two_processes(gather=True)
alone = train(slice(None), wrap=False)

print("step   process 0   process 1   one process")
for step in (0, 20, 40, STEPS - 1):
    print(f"{step:4}   {first[0][step]:9.6f}   {second[0][step]:9.6f}   {alone[0][step]:11.6f}")
difference = (first[1] - alone[1]).abs().max().item()
print(f"prototypes at the end: largest difference {difference:.0e}")
print("the same on both processes:", torch.equal(first[1], second[1]))

# %% [markdown]
# Both processes print the loss of the complete batch, and the prototypes agree to rounding after
# the last step.
#
# ## Without gathering
#
# With `gather=False` each process has the loss of its own graphs: fewer negatives, and assignments
# that are balanced over fewer embeddings. The training differs from that on one process.

# %%
separate = two_processes(gather=False)
print("step   process 0   process 1   one process")
for step in (0, STEPS - 1):
    print(
        f"{step:4}   {separate[0][0][step]:9.6f}   {separate[1][0][step]:9.6f}   "
        f"{alone[0][step]:11.6f}"
    )

# %% Losses by step: one process, two processes, and two processes with gather=False
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(alone[0], color="0.75", lw=5, label="one process")
axes.plot(first[0], "k--", lw=1, label="two processes")
axes.plot(separate[0][0], color="tab:orange", lw=1, label="gather=False, process 0")
axes.plot(separate[1][0], color="tab:red", lw=1, label="gather=False, process 1")
axes.set(xlabel="step", ylabel="loss")
figure.legend(loc="outside upper center", ncols=2)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Next steps
#
# [Large batches and many GPUs](../distributed.md) has the conditions, FSDP2, and what the exchange
# costs.
