"""The losses of published scripts, each as the formula of its code, named by its function.

They are plain torch, without the epsilons in the norms, logarithms and denominators of the code.
"""

import math

import torch
import torch.nn.functional as F
from torch import arange


def cosines(a, b, tau):
    return F.normalize(a) @ F.normalize(b).T / tau


def dots(a, b, tau):
    return a @ b.T / tau


def others(scores):
    """All but the diagonal."""
    return scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -torch.inf)


def diagonal(logits):
    """The positive of query i is key i."""
    return F.cross_entropy(logits, arange(len(logits)))


def graphcl(x, x_aug, tau, scores=cosines):
    """`loss_cal` of GraphCL, JOAO and SimGRACE; AD-GCL with sym=False; DIG's and 3DInfomax's."""
    sim = scores(x, x_aug, tau)
    return (others(sim).logsumexp(1) - sim.diag()).mean()


def adgcl(x, x_aug, tau):
    """`calc_loss` of AD-GCL, with its default sym=True."""
    return (graphcl(x, x_aug, tau) + graphcl(x_aug, x, tau)) / 2


def grace(h1, h2, tau, scores=cosines, mean=True):
    """`loss` of GRACE and GCA after projection; DIG's for GRACE; PyGCL with intraview_negs."""

    def semi_loss(a, b):
        within, between = scores(a, a, tau), scores(a, b, tau)
        return torch.cat([others(within), between], 1).logsumexp(1) - between.diag()

    losses = (semi_loss(h1, h2) + semi_loss(h2, h1)) / 2
    return losses.mean() if mean else losses.sum()


def molclr(zis, zjs, tau):
    """`NTXentLoss` of MolCLR and `InstanceLoss` of Contrastive Clustering, whose embeddings are
    normalised before."""
    z, n = torch.cat([zjs, zis]), len(zis)
    return F.cross_entropy(others(cosines(z, z, tau)), arange(2 * n).roll(n))


def hcl(out_1, out_2, tau, beta=1.0, tau_plus=0.1):
    """`criterion` of HCL with estimator="hard" and its defaults."""
    out, n = F.normalize(torch.cat([out_1, out_2])), len(out_1)
    scores, own = out @ out.T / tau, torch.eye(n, dtype=torch.bool).repeat(2, 2)
    neg, pos = scores[~own].view(2 * n, -1).exp(), scores.roll(n, 0).diag().exp()
    importance, count = neg**beta, 2 * n - 2
    reweighted = (importance * neg).sum(1) / importance.mean(1)
    total = (reweighted - tau_plus * count * pos) / (1 - tau_plus)
    total = total.maximum(count * (-1 / tau).exp())
    return -(pos / (pos + total)).log().mean()


def gcc(keys, queries, tau, scores=cosines):
    """GCC without --moco; `loss_cl` of ProG's GraphCL and SimGRACE; GraphLoG's `inter_NCE_loss`;
    `InfoNCE` of SELFRec; `ssl_con_loss` of RLMRec; info-nce-pytorch without negative keys."""
    return diagonal(scores(keys, queries, tau))


def clip(images, texts, tau, scores=cosines):
    """CLIP, GraphCLIP, GraphGPT's `cal_cl_loss`; MoleculeSTM's `do_CL`; `dual_CL` of GraphMVP."""
    return (gcc(images, texts, tau, scores) + gcc(texts, images, tau, scores)) / 2


def tricl(e1, e2, tau, mean=True):
    """`node_level_loss` of TriCL, and its `group_level_loss` of hyperedges."""
    between = cosines(e1, e2, tau)
    losses = -sum(sim.log_softmax(1).diag() for sim in (between, between.T)) / 2
    return losses.mean() if mean else losses.sum()


def dcl(z1, z2, tau):
    """`DCL` of raminnakhli/Decoupled-Contrastive-Learning, which adds both directions."""

    def one_way(a, b):
        within, between = cosines(a, a, tau), cosines(a, b, tau)
        negatives = torch.cat([others(within), others(between)], 1)
        return (negatives.logsumexp(1) - between.diag()).mean()

    return one_way(z1, z2) + one_way(z2, z1)


def moco(q, k, queue, tau):
    """`forward` of MoCo, GCC's `MemoryMoCo`: class 0 is the positive, and the others are stored."""
    positives = F.cosine_similarity(q, k).unsqueeze(1) / tau
    logits = torch.cat([positives, cosines(q, queue, tau)], 1)
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def supcontrast(features, mask, tau, base_tau=0.07):
    """`SupConLoss` of SupContrast and `sup_loss` of GraphCLIP, for each of the normalised features.

    The mask [M, M] has the positives; its diagonal does not count.
    """
    logits, mask = dots(features, features, tau), mask & ~torch.eye(len(mask), dtype=torch.bool)
    log_prob = logits - others(logits).logsumexp(1, keepdim=True)
    return -tau / base_tau * (mask * log_prob).sum(1) / mask.sum(1)


def imbalance(c):
    """log K minus the entropy of how the batch is distributed over K clusters, c [N, K]."""
    shares = c.sum(0) / c.sum()
    return math.log(len(shares)) + (shares * shares.log()).sum()


def cluster_loss(c_i, c_j, tau):
    """`ClusterLoss` of Contrastive Clustering: the columns of the assignments are embeddings."""
    return molclr(c_i.T, c_j.T, tau) + imbalance(c_i) + imbalance(c_j)


def agc(c_i, c_j, tau, entropy_weight=2.0):
    """`AGCLoss` of Graph Contrastive Clustering, after its softmax."""
    return gcc(c_i.T, c_j.T, tau) + entropy_weight * imbalance(c_i)


def swav(outputs, tau, crops_for_assign=2):
    """`train` of main_swav.py: outputs [N, K] of each crop are its cosines to the prototypes.

    The first crops give targets, which all other crops predict.
    """
    loss = 0
    for crop in range(crops_for_assign):
        q = (outputs[crop].detach() / 0.05).exp()  # [N, K]
        for _ in range(3):
            q = q / q.sum(0)
            q = q / q.sum(1, keepdim=True)
        predictions = [
            (output / tau).log_softmax(1) for v, output in enumerate(outputs) if v != crop
        ]
        loss = loss - sum((q * log_p).sum(1).mean() for log_p in predictions) / len(predictions)
    return loss / crops_for_assign
