"""Losses of recommendation, of graphs with texts, of knowledge graphs, labels and sentences.

Each formula is that of the script's code, named by its function, in plain torch, without the
epsilons in its norms and logarithms. test_swaps.py has graphs, nodes and molecules.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from core.test_swaps import DIM, SEEDS, TEMPERATURES, assert_same, few
from helpers.rank_models import of_seed
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
from torch import Tensor, arange

from pgcl_losses import InfoNCE, PGCLLoss


class Problem(NamedTuple):
    """Two views of N things, a table of K things that has a row for each, and a temperature."""

    z1: Tensor  # [N, D], not normalised
    z2: Tensor  # [N, D]
    table: Tensor  # [K, D]
    hard: Tensor  # [N, 2, D], hard negatives or captions of each
    tau: Tensor  # []
    row: Tensor  # [N]
    labels: Tensor  # [N]
    known: Tensor  # [N, K], pairs that are not to be negatives; none is (i, i)


def problem(seed, length, temperature):
    random, num = of_seed(seed), length + 2
    shapes = (length, DIM), (length, DIM), (num, DIM), (length, 2, DIM)
    values = [torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes]
    values.append(torch.tensor(temperature, dtype=torch.float64))
    row = torch.randint(num, (length,), generator=random)
    labels = torch.randint(3, (length,), generator=random)
    labels[:3] = torch.tensor([0, 0, 1])  # one pair and one negative at least
    known = torch.rand(length, num, generator=random) < 0.2
    return Problem(*map(torch.nn.Parameter, values), row, labels, known.fill_diagonal_(False))


def cosines(a, b, tau):
    return F.normalize(a) @ F.normalize(b).T / tau


def diagonal(logits):
    """The positive of query i is key i."""
    return F.cross_entropy(logits, arange(len(logits)))


def both(logits):
    """From each view to the other, as in CLIP."""
    return (diagonal(logits) + diagonal(logits.T)) / 2


def cross(p, queries="first", **options):
    return InfoNCE(**{"temperature": p.tau, **options}, negatives="cross", queries=queries)


def selfrec(p):
    """`InfoNCE` of SELFRec; `ssl_con_loss` of RLMRec; info-nce-pytorch without negative keys."""
    return diagonal(cosines(p.z1, p.z2, p.tau)), cross(p)(p.z1, p.z2)


def selfrec_dot(p):
    """The same with b_cos=False."""
    return diagonal(p.z1 @ p.z2.T / p.tau), cross(p, similarity="dot")(p.z1, p.z2)


def ncl(p):
    """`ssl_layer_loss` of NCL for users; `cal_infonce_loss` of SSLRec and RLMRec."""
    expected = F.cross_entropy(cosines(p.z1, p.table, p.tau), p.row, reduction="sum")
    items = p.row, arange(len(p.table))
    return expected, cross(p, reduction="sum")(p.z1, p.table, items=items)


def proto_nce(p):
    """`ProtoNCE_loss` of NCL for users: the table has centroids, and the rows are clusters."""
    return ncl(p._replace(table=p.table.detach()))


def pcl(p):
    """`forward` of PCL: positive prototypes, then others, each with its own concentration."""
    others = [k for k in range(len(p.table)) if k not in p.row]
    sample = p.table.detach()[torch.cat([p.row, torch.tensor(others)])]
    prototypes, concentrations = F.normalize(sample), sample.norm(dim=1)
    loss_of = cross(p, temperature=1.0, similarity="dot")
    items = arange(len(p.z1)), arange(len(sample))
    ours = loss_of(F.normalize(p.z1), prototypes / concentrations[:, None], items=items)
    return diagonal(cosines(p.z1, prototypes, concentrations)), ours


def lightgcl(p):
    """LightGCL for users, where no positive's score is clamped."""
    largest = ((p.z1 * p.table[p.row]).sum(1) / p.tau).abs().max().item()
    scale, items = min(1, 4.9 / largest), (p.row, arange(len(p.table)))
    scores = scale * p.z1 @ p.table.T / p.tau
    expected = scores.exp().sum(1).log() - scores[arange(len(p.row)), p.row].clamp(-5.0, 5.0)
    return expected.mean(), cross(p, similarity="dot")(scale * p.z1, p.table, items=items)


def known_interactions(p):
    """Users against a table of items, without those that they are known to like as well."""
    user, item = (p.known | torch.eye(*p.known.shape).bool()).nonzero().T
    pairs, weights = torch.stack([user, len(p.z1) + item]), (user == item).double()
    ours = cross(p)(p.z1, p.table, positives=pairs, positive_weights=weights)
    return diagonal(cosines(p.z1, p.table, p.tau).masked_fill(p.known, -torch.inf)), ours


def clip(p):
    """`forward` of GraphCLIP; `cal_cl_loss` of GraphGPT, for each of three pairs."""
    return both(cosines(p.z1, p.z2, p.tau)), cross(p, "all")(p.z1, p.z2)


def moleculestm(p):
    """`do_CL` of MoleculeSTM with InfoNCE and --no_normalize, in both directions."""
    return both(p.z1 @ p.z2.T / p.tau), cross(p, "all", similarity="dot")(p.z1, p.z2)


def mil_nce(p):
    """`MILNCELoss` from videos to texts; the whole of it has both directions in one sum."""
    scores = torch.einsum("id, jcd -> ijc", p.z1, p.hard)
    expected = (scores.flatten(1).logsumexp(1) - scores.diagonal().logsumexp(0)).mean()
    loss_of = cross(p, temperature=1.0, similarity="dot", over_positives="sum")
    items = arange(len(p.z1)), arange(len(p.z1)).repeat_interleave(2)
    return expected, loss_of(p.z1, p.hard.flatten(0, 1), items=items)


def simkgc(p):
    """`compute_logits` of SimKGC without margin, and both directions of its trainer."""
    masked = p.known[:, : len(p.z1)]
    head, tail = masked.nonzero().T
    pairs, weights = torch.stack([head, len(p.z1) + tail]), torch.zeros(2 * len(head))
    given = {"positives": torch.cat([pairs, pairs.flip(0)], 1), "positive_weights": weights}
    expected = both(cosines(p.z1, p.z2, p.tau).masked_fill(masked, -1e4))
    return 2 * expected, 2 * cross(p, "all")(p.z1, p.z2, **given)


def supcontrast(p, queries="all"):
    """`SupConLoss` of SupContrast and `sup_loss` of GraphCLIP, for normalised features."""
    features, labels = torch.cat([p.z1, p.z2]), p.labels.repeat(2)
    own, logits = torch.eye(len(labels)).bool(), cosines(features, features, p.tau)
    log_prob = logits - logits.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    mask = (labels[:, None] == labels) & ~own
    losses = -p.tau / 0.07 * (mask * log_prob).sum(1) / mask.sum(1)
    loss_of = InfoNCE(temperature=p.tau, over_positives="supcon", queries=queries)
    ours = p.tau / 0.07 * loss_of(p.z1, p.z2, items=(p.labels, p.labels))
    return losses[: len(p.z1)].mean() if queries == "first" else losses.mean(), ours


def supcontrast_one(p):
    """The same with contrast_mode="one"."""
    return supcontrast(p, queries="first")


def supcon(p):
    loss_of = InfoNCE(temperature=p.tau, over_positives="supcon")
    return SupConLoss(p.tau)(p.z1, p.labels), loss_of(p.z1, items=p.labels)


def ntxent(p):
    """pytorch-metric-learning takes the mean over all positive pairs."""
    losses = InfoNCE(temperature=p.tau, reduction="none")(p.z1, items=p.labels)
    pairs = (p.labels[:, None] == p.labels).sum(1) - 1  # of each query
    return NTXentLoss(p.tau)(p.z1, p.labels), (losses * pairs).sum() / pairs.sum()


def sentences(p, queries="first"):
    """`MultipleNegativesRankingLoss` of sentence-transformers, with hard negatives."""
    docs = torch.cat([p.z2, *p.hard.unbind(1)])
    ours = cross(p, queries)(p.z1, docs, items=(arange(len(p.z1)), arange(len(docs))))
    return diagonal(cosines(p.z1, docs, p.tau)), ours


def sentences_symmetric(p):
    """The same with "doc_to_query" and partition_mode="per_direction"."""
    to_docs, ours = sentences(p, queries="all")
    return (to_docs + diagonal(cosines(p.z2, p.z1, p.tau))) / 2, ours


def paired(p):
    """`info_nce` of info-nce-pytorch with negative_mode="paired"."""
    keys, query = torch.cat([p.z2[:, None], p.hard], 1), arange(len(p.z1))
    logits = torch.einsum("nd, nmd -> nm", F.normalize(p.z1), F.normalize(keys, dim=-1)) / p.tau
    negatives = torch.stack([query.repeat_interleave(2), 2 * len(query) + arange(2 * len(query))])
    given = {"positives": torch.stack([query, len(query) + query]), "negative_pairs": negatives}
    loss_of = InfoNCE(temperature=p.tau, negatives="given", queries="first")
    ours = loss_of(p.z1, torch.cat([p.z2, p.hard.flatten(0, 1)]), **given)
    return F.cross_entropy(logits, torch.zeros_like(query)), ours


def swav(p):
    """`train` of main_swav.py with two crops, where the prototypes have norm 1."""
    pgcl = PGCLLoss(DIM, len(p.table), temperature=p.tau, contrast_weight=0, consistency_weight=1)
    ours = torch.func.functional_call(pgcl, {"prototypes.weight": p.table}, (p.z1, p.z2))
    outputs = [cosines(z, p.table, 1) for z in (p.z1, p.z2)]
    expected = 0
    for output, other in (outputs, outputs[::-1]):
        q = (output.detach() / 0.05).exp().T  # [K, N]
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / len(q)
            q = q / q.sum(0)
        expected = expected - (q.T * (other / p.tau).log_softmax(1)).sum(1).mean() / 2
    return expected, ours


RECOMMENDATION = [selfrec, selfrec_dot, ncl, proto_nce, pcl, lightgcl, known_interactions]
TEXTS = [clip, moleculestm, mil_nce, simkgc, sentences, sentences_symmetric, paired]
LABELS = [supcontrast, supcontrast_one, supcon, ntxent]


@few
@given(seed=SEEDS, length=st.integers(3, 9), temperature=TEMPERATURES)
@pytest.mark.parametrize("script", [*RECOMMENDATION, *TEXTS, *LABELS, swav])
def test_a_swap_gives_the_loss_of_the_script(script, seed, length, temperature):
    p = problem(seed, length, temperature)
    expected, ours = script(p)
    assert_same(ours, expected, [p.z1, p.z2, p.table, p.hard, p.tau])
