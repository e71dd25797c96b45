"""The losses of published scripts: our presets give their value and their gradient.

Formulas of two views are in helpers/formulas.py; those of other inputs are here. Our value is
computed as the table of presets says, literally. tests/adapters/pygcl calls PyGCL itself.
"""

import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import formulas
from helpers.formulas import (
    adgcl,
    clip,
    cosines,
    dcl,
    diagonal,
    dots,
    gcc,
    grace,
    graphcl,
    hcl,
    moco,
    molclr,
    others,
    tricl,
)
from helpers.losses import DIM, gradients, of_seed
from helpers.marks import examples
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning.losses import NTXentLoss, SupConLoss
from torch import Tensor, arange

from pgcl_losses import InfoNCE, PGCLLoss, SinkhornPrototypes
from pgcl_losses.presets import PRESETS

SEEDS, TEMPERATURES = st.integers(0, 10**6), st.sampled_from([0.1, 0.2, 0.5, 1.0])
few = examples(25)


class Problem(NamedTuple):
    """Two views of N things, a table of K things that has a row for each, and a temperature."""

    z1: Tensor  # [N, D], not normalised
    z2: Tensor  # [N, D]
    table: Tensor  # [K, D]
    hard: Tensor  # [N, 2, D], hard negatives, captions or conformers of each
    saliency: Tensor  # [N, N], weights of positives
    tau: Tensor  # []
    row: Tensor  # [N]
    labels: Tensor  # [N]
    known: Tensor  # [N, K], pairs that are related; none is (i, i)


def problem(seed, n, temperature):
    random, num = of_seed(seed), n + 2
    shapes = (n, DIM), (n, DIM), (num, DIM), (n, 2, DIM)
    values = [torch.randn(shape, dtype=torch.float64, generator=random) for shape in shapes]
    values.append(torch.rand(n, n, dtype=torch.float64, generator=random))
    values.append(torch.tensor(temperature, dtype=torch.float64))
    row = torch.randint(num, (n,), generator=random)
    labels = torch.randint(3, (n,), generator=random)
    labels[:3] = torch.tensor([0, 0, 1])  # one pair and one negative at least
    known = torch.rand(n, num, generator=random) < 0.3
    return Problem(*map(torch.nn.Parameter, values), row, labels, known.fill_diagonal_(False))


def simclr(z1, z2, tau):
    """NT-Xent: `info_nce_loss` of sthalles/SimCLR, here of pytorch-metric-learning."""
    return NTXentLoss(tau)(torch.cat([z1, z2]), arange(len(z1)).repeat(2))


def grace_sum(h1, h2, tau):
    """With mean=False the script has half of our sum."""
    return 2 * grace(h1, h2, tau, mean=False)


def tricl_sum(e1, e2, tau):
    """With mean=False the script has half of our sum."""
    return 2 * tricl(e1, e2, tau, mean=False)


VIEWS, DOT = ("view1", "view2"), {"similarity": "dot"}
SWAPS = {  # name[, variant]: the script's loss, what the views are called, further options
    "GraphCL": (graphcl, VIEWS, {}),
    "JOAO": (graphcl, VIEWS, {}),
    "SimGRACE": (graphcl, VIEWS[::-1], {}),
    "AD-GCL": (adgcl, VIEWS, {}),
    "PyGCL": (clip, VIEWS, {}),
    "DIG": (graphcl, VIEWS, {}),
    "DIG, norm=False": (partial(graphcl, scores=dots), VIEWS, DOT),
    "ProG": (gcc, VIEWS, {}),
    "SimCLR": (simclr, VIEWS, {}),
    "HCL": (hcl, VIEWS, {}),
    "HCL, beta=2": (partial(hcl, beta=2.0), VIEWS, {"hardness": 2.0}),
    "DCL": (dcl, VIEWS, {}),
    "DCL-debiased": (partial(hcl, beta=0.0), VIEWS, {}),
    "GCC": (gcc, ("feat_k", "feat_q"), {}),
    "MolCLR": (molclr, VIEWS, {}),
    "Contrastive-Clustering": (molclr, ("z_i", "z_j"), {}),
    "3DInfomax": (graphcl, ("z2d", "z3d"), {}),
    "3DInfomax, norm=False": (partial(graphcl, scores=dots), ("z2d", "z3d"), DOT),
    "GraphMVP": (clip, VIEWS, {}),
    "GraphMVP, not normalised": (partial(clip, scores=dots), VIEWS, DOT),
    "GraphLoG": (gcc, ("modified", "graphs"), {}),
    "GRACE": (grace, VIEWS, {}),
    "GRACE, mean=False": (grace_sum, VIEWS, {"reduction": "sum"}),
    "GRACE, of DIG with norm=False": (partial(grace, scores=dots), VIEWS, DOT),
    "GCA": (grace, VIEWS, {}),
    "TriCL": (tricl, VIEWS, {}),
    "TriCL, mean=False": (tricl_sum, VIEWS, {"reduction": "sum"}),
    "SELFRec": (gcc, VIEWS, {}),
    "SELFRec, b_cos=False": (partial(gcc, scores=dots), VIEWS, DOT),
    "CLIP": (clip, ("images", "texts"), {}),
    "GraphGPT": (clip, VIEWS, {}),
    "MoleculeSTM": (clip, VIEWS, {}),
    "MoleculeSTM, not normalised": (partial(clip, scores=dots), VIEWS, DOT),
    "info-nce-pytorch": (gcc, ("query", "positive_key"), {}),
}


def value_of(name, tau, options=None, **names):
    """The value that the table of presets says is the script's, computed as it is written there."""
    preset, options = PRESETS[name], {"temperature": tau, **(options or {})}
    if preset.value:
        with pytest.raises(ValueError, match=re.escape(f"write {preset.value}, with")):
            InfoNCE.like(name, **options)
        loss_of = InfoNCE(**{**preset.options, **options})
    else:
        loss_of = InfoNCE.like(name, **options)
    functions = {"arange": arange, "zeros": torch.zeros, "normalize": F.normalize}
    return eval(preset.expression(), {**functions, "loss_of": loss_of, **names})


def swapped(name, p):
    script, views, options = SWAPS[name]
    names = dict(zip(views, (p.z1, p.z2), strict=True))
    return script(p.z1, p.z2, p.tau), value_of(name.partition(", ")[0], p.tau, options, **names)


def first(p, **options):
    return InfoNCE(temperature=p.tau, negatives="cross", queries="first", **options)


# What has more than two views: a problem -> the loss of the script, and ours.


def heco(p, lam=0.5):
    """`Contrast` after its projections, with lambda; row i of `pos` has the positives of node i."""
    n = len(p.z1)
    pos = p.known[:, :n] | torch.eye(n).bool()

    def one_way(a, b):
        return -(cosines(a, b, p.tau).softmax(1) * pos).sum(1).log().mean()

    a, b = pos.nonzero().T
    positives = torch.stack([torch.cat([a, n + a]), torch.cat([n + b, b])])
    names, options = {"z_mp": p.z1, "z_sc": p.z2, "pairs": positives}, {}
    expected = lam * one_way(p.z1, p.z2) + (1 - lam) * one_way(p.z2, p.z1)
    if lam == 0.5:
        return expected, value_of("HeCo", p.tau, options, **names)
    mp, sc = value_of("HeCo", p.tau, {"reduction": "none"}, **names).view(2, n).mean(1)
    return expected, lam * mp + (1 - lam) * sc


def homogcl(p):
    """`loss`, without what its code counts twice: a node's other view in the denominator."""
    n = len(p.z1)
    adj1, adj2 = p.known[:, :n].double(), p.known[:, :n].T.double()

    def semi_loss(a, adj_a, b, adj_b):
        within, between = cosines(a, a, p.tau).exp(), cosines(a, b, p.tau).exp()
        pos = between.diag() + (within * adj_a * p.saliency).sum(1)
        neg = (within * (1 - adj_a)).sum(1) + (between * (1 - adj_b)).sum(1)
        return -(pos / (pos + neg - within.diag() - between.diag())).log()

    expected = (semi_loss(p.z1, adj1, p.z2, adj2) + semi_loss(p.z2, adj2, p.z1, adj1)).mean() / 2
    edges1, edges2 = adj1.nonzero().T, adj2.nonzero().T
    to_other = torch.tensor([[0], [n]])
    of_others = edges2 + to_other, edges1 + to_other.flip(0)
    positives = torch.cat([edges1, n + edges2, *of_others], 1)
    weights = torch.cat([p.saliency[tuple(edges)] for edges in (edges1, edges2)])
    loss_of = InfoNCE(temperature=p.tau, over_positives="sum")
    weights = torch.cat([weights, 0 * weights])
    given = {"labels": torch.arange(n), "positives": positives, "positive_weights": weights}
    return expected, loss_of(p.z1, p.z2, **given)


def conformers(p):
    """`NTXentMultiplePositives` of 3DInfomax: several 3D conformers of each molecule."""
    n = len(p.z1)
    z3d = p.hard.flatten(0, 1)
    sim = cosines(p.z1, z3d, p.tau).view(n, n, 2).logsumexp(2)
    ours = value_of("3DInfomax-conformers", p.tau, z2d=p.z1, z3d=z3d, N=n, C=2)
    return (others(sim).logsumexp(1) - sim.diag()).mean(), ours


def cloome(p):
    """`cloob` of CLOOME, whose `infoLOOB_loss` is multiplied by the temperature."""
    p_xx, p_xy, p_yy, p_yx = p.z1, p.z2, *p.hard.unbind(1)
    ours = value_of("CLOOME", p.tau, p_xx=p_xx, p_xy=p_xy, p_yy=p_yy, p_yx=p_yx)
    return p.tau * (graphcl(p_xx, p_xy, p.tau) + graphcl(p_yy, p_yx, p.tau)), ours


def magi(p):
    """`Loss` of MAGI: the mask's pairs are positives.

    Its mask pairs a node that has no other positive with itself. These nodes are left out here.
    """
    rows, columns = p.known[:, : len(p.z1)].nonzero().T
    own = torch.eye(len(p.z1), dtype=torch.bool)
    log_probs = dots(p.z1, p.z1, p.tau)
    log_probs = log_probs - log_probs.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    of_nodes = [log_probs[row, columns[rows == row]].mean() for row in rows.unique()]
    expected = p.tau * -torch.stack(of_nodes or [0 * log_probs.sum()]).mean()
    return expected, value_of("MAGI", p.tau, z=p.z1, pairs=torch.stack([rows, columns]))


def graphlog(p):
    """`intra_NCE_loss`: masked nodes against their graph, whose masked nodes are positives."""
    n, one, other = len(p.z1), *p.hard.unbind(1)
    nodes, modified = torch.cat([p.z1, p.z2, one]), torch.cat([other, p.z1, p.z2])
    graph, masked = arange(n).repeat(3), arange(n + 1)  # two nodes of graph 0
    same = graph[masked].unsqueeze(1) == graph  # [masked nodes, nodes]
    is_positive, behind = same & (arange(3 * n) <= n), torch.tensor([[0], [n + 1]])
    sims = cosines(modified[masked], nodes, p.tau).exp()
    ours = value_of(
        "GraphLoG-nodes",
        p.tau,
        modified=modified,
        masked=masked,
        nodes=nodes,
        same_masked=is_positive.nonzero().T + behind,
        same_others=(same & ~is_positive).nonzero().T + behind,
    )
    return -((sims * is_positive).sum(1) / (sims * same).sum(1)).log().mean(), ours


def sampled_links(p, k, similarity):
    """`Gprompt_link_loss` of ProG; `LinkNeighborLoader` of PyG with triplets and cross-entropy;
    `info_nce` of info-nce-pytorch with negative_mode="paired"."""
    n, link = len(p.z1), arange(len(p.z1))
    dst = (p.row[:, None] + arange(1 + k)) % len(p.table)  # the positive, then sampled negatives
    unit = partial(F.normalize, dim=-1) if similarity == "cosine" else lambda z: z
    logits = torch.einsum("nd, nmd -> nm", unit(p.z1), unit(p.table[dst])) / p.tau
    pairs = torch.stack([link.repeat_interleave(k), 2 * n + arange(n * k)])
    keys = p.table[torch.cat([dst[:, 0], dst[:, 1:].flatten()])]
    loss_of = first(p, similarity=similarity)
    ours = loss_of(p.z1, keys, labels=(link, arange(len(keys))), negative_pairs=pairs)
    return F.cross_entropy(logits, torch.zeros_like(link)), ours


def known_links(p):
    """A link of each user against all items but its known ones: sets of other lengths by index."""
    n = len(p.z1)
    known = p.known.scatter(1, p.row[:, None], False)
    logits = dots(p.z1, p.table, p.tau).masked_fill(known, -torch.inf)
    pairs = torch.cat([torch.stack([arange(n), p.row]), known.nonzero().T], 1)
    given = {"positive_weights": (arange(pairs.shape[1]) < n).double()}
    given["positives"] = pairs + torch.tensor([[0], [n]])
    return F.cross_entropy(logits, p.row), first(p, similarity="dot")(p.z1, p.table, **given)


def to_table(p, z, scores=cosines):
    """Cross-entropy of some rows of a table against all its rows."""
    return F.cross_entropy(scores(z, p.table, p.tau), p.row, reduction="sum")


def gprompt(p):
    """`Gprompt_tuning_loss` of ProG, where the table has centers of classes."""
    names = {"embeddings": p.z1, "centers": p.table, "labels": p.row}
    return to_table(p, p.z1), value_of("GPrompt", p.tau, **names)


def sslrec(p):
    """`cal_infonce_loss` of SSLRec and RLMRec; z has an embedding of each row of the table."""
    z = torch.cat([p.z1, p.z2])[: len(p.table)]
    names = {"z": z, "rows": p.row, "table": p.table}
    return to_table(p, z[p.row]), value_of("SSLRec", p.tau, **names)


def ncl(p, alpha=1.5):
    """`ssl_layer_loss` of NCL, without its factor of 1e-7, which would hide any difference."""
    u, i = torch.cat([p.z1, p.z2])[: len(p.table)], torch.cat([p.z2, p.z1])[: len(p.table)]
    names = {"u": u, "i": i, "users": p.table, "items": p.table, "rows": p.row, "cols": p.row}
    expected = to_table(p, u[p.row]) + alpha * to_table(p, i[p.row])
    return expected, 1e7 * value_of("NCL", p.tau, alpha=alpha, **names)


def ncl_prototypes(p):
    """`ProtoNCE_loss` of NCL, where the table has centroids, and row i of it is in cluster i."""
    z, clusters = torch.cat([p.z1, p.z2])[: len(p.table)], arange(len(p.table))
    names = {"z": z, "rows": p.row, "centroids": p.table, "clusters": clusters}
    return to_table(p, z[p.row]), value_of("NCL-ProtoNCE", p.tau, **names)


def pcl(p):
    """`forward` of PCL: positive prototypes, then others, each with its own concentration."""
    return proto_nce(p, p.table, p.row)


def proto_nce(p, table, clusters):
    """The loss of PCL for one clustering."""
    others = [k for k in range(len(table)) if k not in clusters]
    sample = table.detach()[torch.cat([clusters, torch.tensor(others).long()])]
    prototypes, concentrations = F.normalize(sample), sample.norm(dim=1)
    names = {"q": p.z1, "prototypes": prototypes, "density": concentrations}
    ours = value_of("PCL", 1.0, ids=arange(len(sample)), **names)
    return diagonal(cosines(p.z1, prototypes, concentrations)), ours


def pcl_several(p):
    """`train` of main_pcl.py with three numbers of clusters: the mean over the clusterings."""
    tables = [p.table[:num] for num in (2, 4, len(p.table))]
    losses = [proto_nce(p, table, p.row % len(table)) for table in tables]
    return [sum(values) / len(tables) for values in zip(*losses, strict=True)]


def xgoal(p):
    """`info_nce` of X-GOAL: the only negative of a node is the node in the corrupted view."""
    return of_corrupted(p, p.z1, p.z2, p.hard[:, 0])


def of_corrupted(p, h_org, h_pos, h_neg):
    n = len(h_org)
    pairs = torch.stack([arange(n), 2 * n + arange(n)])
    ours = value_of("X-GOAL", p.tau, h_org=h_org, h_pos=h_pos, h_neg=h_neg, N=n, pairs=pairs)
    pos, neg = (F.cosine_similarity(h_org, h) / p.tau for h in (h_pos, h_neg))
    return -(pos.exp() / (pos.exp() + neg.exp())).log().mean(), ours


def xgoal_alignment(p):
    """`node_alignment` of X-GOAL: the same node in all pairs of two layers, here of three."""
    h_list = [p.z1, p.z2, p.hard[:, 0]]
    h_list_neg = [h.roll(1, 0) for h in h_list]
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    losses = [of_corrupted(p, h_list[i], h_list[j], h_list_neg[i]) for i, j in pairs]
    return [sum(values) / len(pairs) for values in zip(*losses, strict=True)]


def xgoal_clusters(p):
    """`loss_kmeans` of X-GOAL, whose centroids are columns."""
    x, centroids, target = p.z1, p.table.T, p.row
    ours = first(p, similarity="dot")(x, centroids.T, labels=(target, arange(len(centroids.T))))
    return F.cross_entropy(x @ centroids / p.tau, target), ours


def contrast_of_clusters(p, script, entropy_weights, **options):
    """Assignments to clusters, whose entropy is computed as in the guide."""
    c_i, c_j = p.z1.softmax(1), p.z2.softmax(1)
    ours = value_of("Contrastive-Clustering-clusters", p.tau, options, c_i=c_i, c_j=c_j)
    for c, weight in zip((c_i, c_j), entropy_weights, strict=True):
        mean = c.mean(0)
        ours = ours + weight * (mean * (len(mean) * mean).log()).sum()
    return script(p.z1.softmax(1), p.z2.softmax(1), p.tau), ours


def lightgcl(p):
    """LightGCL for users, where no positive's score is clamped."""
    z = torch.cat([p.z1, p.z2])[: len(p.table)]
    largest = ((z[p.row] * p.table[p.row]).sum(1) / p.tau).abs().max().item()
    scale = min(1, 4.9 / largest)
    scores = dots(scale * z[p.row], p.table, p.tau)
    expected = scores.exp().sum(1).log() - scores[arange(len(p.row)), p.row].clamp(-5.0, 5.0)
    return expected.mean(), value_of("LightGCL", p.tau, z=scale * z, rows=p.row, table=p.table)


def simkgc(p):
    """`compute_logits` of SimKGC without margin, and both directions of its trainer."""
    masked = p.known[:, : len(p.z1)]
    head, tail = masked.nonzero().T
    pairs = torch.stack([head, len(p.z1) + tail])
    pairs = torch.cat([pairs, pairs.flip(0)], 1)
    logits = cosines(p.z1, p.z2, p.tau).masked_fill(masked, -1e4)
    ours = value_of("SimKGC", p.tau, hr=p.z1, tail=p.z2, N=len(p.z1), pairs=pairs)
    return diagonal(logits) + diagonal(logits.T), ours


def supcontrast(p, queries="all"):
    features, labels = F.normalize(torch.cat([p.z1, p.z2])), p.labels.repeat(2)
    losses = formulas.supcontrast(features, labels[:, None] == labels, p.tau)
    views = {"view1": p.z1, "view2": p.z2}
    ours = value_of("SupContrast", p.tau, {"queries": queries}, **views, labels=p.labels)
    return losses[: len(p.z1)].mean() if queries == "first" else losses.mean(), ours


def supcon(p):
    return SupConLoss(p.tau)(p.z1, p.labels), value_of("SupCon", p.tau, z=p.z1, labels=p.labels)


def ntxent(p):
    """pytorch-metric-learning takes the mean over all positive pairs."""
    counts = (p.labels[:, None] == p.labels).sum(1) - 1
    ours = value_of("NTXentLoss", p.tau, z=p.z1, labels=p.labels, counts=counts)
    return NTXentLoss(p.tau)(p.z1, p.labels), ours


def sentences(p, queries="first"):
    """`MultipleNegativesRankingLoss` of sentence-transformers, with hard negatives; for all queries
    with "doc_to_query" and partition_mode="per_direction"."""
    docs = torch.cat([p.z2, *p.hard.unbind(1)])
    loss_of = InfoNCE.like("sentence-transformers", temperature=p.tau, queries=queries)
    ours = loss_of(p.z1, docs, labels=(arange(len(p.z1)), arange(len(docs))))
    expected = diagonal(cosines(p.z1, docs, p.tau))
    if queries == "all":
        expected = (expected + diagonal(cosines(p.z2, p.z1, p.tau))) / 2
    return expected, ours


def swav(p):
    pgcl = PGCLLoss(DIM, len(p.table), temperature=p.tau, contrast_weight=0, consistency_weight=1)
    ours = torch.func.functional_call(pgcl, {"prototypes.weight": p.table}, (p.z1, p.z2))
    return formulas.swav([cosines(z, p.table, 1) for z in (p.z1, p.z2)], p.tau), ours


def swav_crops(p):
    """SwAV with two large and two small crops, by the lines of the guide."""
    crops = p.z1, p.z2, *p.hard.unbind(1)
    prototypes = SinkhornPrototypes(DIM, len(p.table), temperature=p.tau)
    assigned = torch.func.functional_call(prototypes, {"weight": p.table}, crops)
    pairs = [
        (target, other) for target in assigned[:2] for other in assigned if other is not target
    ]
    losses = [-(target.targets * other.log_probs).sum(1).mean() for target, other in pairs]
    return formulas.swav([cosines(z, p.table, 1) for z in crops], p.tau), sum(losses) / len(losses)


def sentences_alone(p):
    names = {"anchors": p.z1, "positives": p.z2}
    return gcc(p.z1, p.z2, p.tau), value_of("sentence-transformers", p.tau, **names)


SCRIPTS = {name: partial(swapped, name) for name in SWAPS}
SCRIPTS |= {
    "AGCLoss": partial(
        contrast_of_clusters,
        script=formulas.agc,
        entropy_weights=(2, 0),
        negatives="cross",
        queries="first",
    ),
    "HeCo, lam=0.3": partial(heco, lam=0.3),
    "PCL, several clusterings": pcl_several,
    "SupContrast, one": partial(supcontrast, queries="first"),
    "SwAV, small crops": swav_crops,
    "X-GOAL, clusters": xgoal_clusters,
    "X-GOAL, node_alignment": xgoal_alignment,
    "sentences, symmetric": partial(sentences, queries="all"),
    "links of ProG": partial(sampled_links, k=1, similarity="cosine"),
    "links of PyG": partial(sampled_links, k=3, similarity="dot"),
}
OTHERS = {
    "3DInfomax-conformers": conformers,
    "CLOOME": cloome,
    "Contrastive-Clustering-clusters": partial(
        contrast_of_clusters, script=formulas.cluster_loss, entropy_weights=(1, 1)
    ),
    "GPrompt": gprompt,
    "GraphLoG-nodes": graphlog,
    "HeCo": heco,
    "HomoGCL": homogcl,
    "LightGCL": lightgcl,
    "MAGI": magi,
    "NCL": ncl,
    "NCL-ProtoNCE": ncl_prototypes,
    "NTXentLoss": ntxent,
    "PCL": pcl,
    "SSLRec": sslrec,
    "SimKGC": simkgc,
    "SupCon": supcon,
    "SupContrast": supcontrast,
    "SwAV": swav,
    "X-GOAL": xgoal,
    "links but known ones": known_links,
    "sentence-transformers": sentences_alone,
    "sentences, with hard negatives": sentences,
}
SCRIPTS |= OTHERS


def test_every_preset_is_held_to_its_script():
    assert PRESETS.keys() - {"MoCo", "GCC-MoCo"} <= SCRIPTS.keys()  # their own test is below


def assert_same(ours, expected, inputs):
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, inputs), gradients(expected, inputs))


@few
@given(seed=SEEDS, length=st.integers(3, 9), temperature=TEMPERATURES)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_swap_gives_the_loss_of_the_script(script, seed, length, temperature):
    p = problem(seed, length, temperature)
    expected, ours = script(p)
    assert_same(ours, expected, p[:6])


@few
@given(seed=SEEDS, length=st.integers(3, 4), temperature=TEMPERATURES)
@pytest.mark.parametrize("name", ["MoCo", "GCC-MoCo"])
def test_moco_and_gcc(name, seed, length, temperature):
    queue, tau = F.normalize(problem(seed, length, 1.0).hard.flatten(0, 1)).detach(), temperature
    loss_of = InfoNCE.like(name, temperature=tau, memory_size=len(queue), dim=DIM).double()
    loss_of.remember(queue)
    for step in range(1, 5):
        q, k = problem(seed + step, length, tau)[:2]
        k = k.detach()
        assert_same(loss_of(q, k), moco(q, k, queue, tau), [q])
        queue = torch.cat([queue[length:], F.normalize(k)])
        loss_of.remember(k)
