# %% [markdown]
# # Many processes
#
# A contrastive loss compares each row with all others. When a batch is shared out to several
# processes, the loss of each part is another loss. `PGCLLoss` puts the parts together: its
# value and its gradients are those of one process with the whole batch. This tutorial starts
# two processes and compares them with one.
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
# Twelve planted groups of vectors stand for graphs, and two layers for their encoder. The loss
# is a part of the model, so `DistributedDataParallel` looks after the prototypes too.

# %%
WIDTH, DIM, BATCH, STEPS = 16, 32, 96, 60

torch.manual_seed(0)
groups = torch.arange(BATCH) % 12
signal = torch.randn(12, WIDTH)[groups] + 0.5 * torch.randn(BATCH, WIDTH)
views = signal + 0.5 * torch.randn(STEPS, 2, BATCH, WIDTH)  # two views for each step


class Model(torch.nn.Module):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, DIM)
        )
        self.pgcl = PGCLLoss(
            DIM, BATCH // 3, consistency_weight=1, warmup_steps=3 * STEPS // 4, gather=gather
        )

    def forward(self, view1: torch.Tensor, view2: torch.Tensor) -> torch.Tensor:
        return self.pgcl(self.encoder(view1), self.encoder(view2))


# %% [markdown]
# ## One training for any number of processes
#
# Each process gets its own part of both views, `mine`. Every process calls the loss equally often.
# At the end of the warm-up all get the same prototypes.


# %%
def train(mine: slice, wrap: bool, gather: bool = True) -> tuple[list[float], torch.Tensor]:
    """The losses of all steps, and the prototypes at the end."""
    torch.manual_seed(1)
    model = Model(gather)
    pgcl = model.pgcl
    loss_of = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for view1, view2 in views[:, :, mine]:
        loss = loss_of(view1, view2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, pgcl.prototypes.weight.detach().clone()


# %% [markdown]
# ## Two processes
#
# The two need not have equally many rows: one gets 64 of the 96, the other 32. They talk
# through `gloo`, and meet in a file.
#
# A notebook has no file that `torchrun` could start. So the processes are forks of this one,
# which see what is defined above. For a training of your own take `torchrun`, as
# [examples/distributed.py](../../examples/distributed.py) does.


# %%
def of_rank(rank: int, meeting: str, gather: bool) -> tuple[list[float], torch.Tensor]:
    distributed.init_process_group(
        "gloo", f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mine = (slice(0, 64), slice(64, BATCH))[rank]
    result = train(mine, wrap=True, gather=gather)
    distributed.destroy_process_group()
    return result


def two_processes(gather: bool) -> list[tuple[list[float], torch.Tensor]]:
    meeting = str(Path(tempfile.mkdtemp()) / "meeting")
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        return list(pool.map(of_rank, (0, 1), (meeting,) * 2, (gather,) * 2))


first, second = two_processes(gather=True)
alone = train(slice(None), wrap=False)

print("step   process 0   process 1   one process")
for step in (0, 20, 40, STEPS - 1):
    print(f"{step:4}   {first[0][step]:9.6f}   {second[0][step]:9.6f}   {alone[0][step]:11.6f}")
apart = (first[1] - alone[1]).abs().max().item()
print(f"prototypes at the end: largest difference {apart:.0e}")
print("the same on both processes:", torch.equal(first[1], second[1]))

# %% [markdown]
# The loss that each process prints is the loss of the whole batch, and the prototypes agree to
# rounding after all steps.
#
# ## Without gathering
#
# `gather=False` gives each process the loss of its own part: fewer negatives, and prototypes
# that are balanced over fewer rows. That is another training, and not the one that you have on
# one process.

# %%
separate = two_processes(gather=False)
print("step   process 0   process 1   one process")
for step in (0, STEPS - 1):
    print(
        f"{step:4}   {separate[0][0][step]:9.6f}   {separate[1][0][step]:9.6f}   "
        f"{alone[0][step]:11.6f}"
    )

# %% Losses of one process, of two processes on the whole batch, and of two that do not gather
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(alone[0], color="0.75", lw=5, label="one process")
axes.plot(first[0], "k--", lw=1, label="two processes")
axes.plot(separate[0][0], color="tab:orange", lw=1, label="gather=False, process 0")
axes.plot(separate[1][0], color="tab:red", lw=1, label="gather=False, process 1")
axes.set(xlabel="step", ylabel="loss")
axes.legend()
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Where to go from here
#
# [Large batches and many GPUs](../distributed.md) has what it costs, what to mind with
# Lightning, queues and checkpoints, and what happens when a process dies.
