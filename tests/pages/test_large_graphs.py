"""The code of docs/large_graphs.md has the values of GRACE's formula."""

import torch
import torch.nn.functional as F
from helpers.scripts import ROOT
from test_docs import run_blocks

TAU = 0.4


def test_some_queries_have_the_mean_of_semi_loss():
    page = run_blocks(ROOT / "docs" / "large_graphs.md")
    z1, z2, chosen = (page[name].detach().double() for name in ("z1", "z2", "chosen"))
    h1, h2, losses = F.normalize(z1), F.normalize(z2), []
    for i in chosen.long().tolist():
        within, between = torch.exp(h1 @ h1[i] / TAU), torch.exp(h2 @ h1[i] / TAU)
        losses.append(-torch.log(between[i] / (within.sum() + between.sum() - within[i])))
    torch.testing.assert_close(page["loss"].double(), torch.stack(losses).mean())
