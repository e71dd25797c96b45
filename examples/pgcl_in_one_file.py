"""PGCL in one file: the loss of "Prototypical Graph Contrastive Learning" in plain torch.

For reading the method (Lin et al., IEEE TNNLS 2022, with its equation numbers), or for copying it.
N graphs have two views, and row i of z1 and of z2 is graph i; D is the embedding dimension, and K
the number of prototypes. docs/how_it_works.md explains each step. Tests compare the losses and
their gradients with PGCLLoss and InfoNCE of the library, which adds:

- batches whose matrix of pairs [2N, 2N] does not fit into memory, and one loss for many processes
- labels, listed positives and negatives, more than two views, several sets of prototypes
- past embeddings as further negatives, and past embeddings that help to balance small batches
- mixed precision, zero vectors without exploding gradient, and the same clusters in all precisions
- checked arguments, and warnings of silent failures, such as collapsed embeddings

As a script, this file trains an MLP on noisy copies of synthetic vectors, and prints the purity of
their clusters: the fraction of vectors that have the most frequent class of their cluster. Some
seconds on a CPU:

    python examples/pgcl_in_one_file.py --epochs 15
"""

import argparse

import torch
import torch.nn.functional as F


def info_nce(z1, z2, temperature=1.0, weights=None):
    """InfoNCE (Eq. 3). With weights of the negatives [2N, 2N]: the reweighted contrast (Eq. 13)."""
    z = F.normalize(torch.cat([z1, z2]), dim=1)  # [2N, D]
    logits = z @ z.T / temperature  # [2N, 2N] one row for each query
    positives = torch.arange(len(z), device=z.device).roll(len(z1))  # [2N] the other view
    if weights is not None:
        logits = logits + weights.scatter(1, positives[:, None], 1.0).log()  # positives weigh 1
    logits = logits.fill_diagonal_(-torch.inf)  # a query is not its own negative
    return F.cross_entropy(logits, positives)


@torch.no_grad()
def sinkhorn(scores, epsilon=0.05, iterations=3):
    """The balanced assignment q of the embeddings of one view (Eq. 7 to 11), without gradient."""
    log_q = scores / epsilon  # [N, K]
    for _ in range(iterations):
        log_q = log_q.log_softmax(0)  # every prototype gets the same total
        log_q = log_q.log_softmax(1)  # every embedding has the total 1
    return log_q.exp()  # [N, K]


def assign(z, prototypes, temperature, epsilon, iterations):
    """The prediction and the balanced assignment of the embeddings of one view."""
    scores = F.normalize(z, dim=1) @ F.normalize(prototypes, dim=1).T  # [N, K] cosines
    log_p = (scores / temperature).log_softmax(1)  # [N, K] the prediction, Eq. 4
    return log_p, sinkhorn(scores, epsilon, iterations)


def consistency(log_p1, log_p2, q1, q2):
    """Swapped prediction (Eq. 5 and 6): each view predicts the assignment of the other view."""
    cross_entropies = -(q2 * log_p1).sum(1) - (q1 * log_p2).sum(1)  # [N]
    return cross_entropies.mean() / 2


@torch.no_grad()
def weights_of_negatives(clusters, prototypes):
    """M_i w_ij for all pairs of embeddings, 0 in the query's cluster (Eq. 12), without gradient."""
    units = F.normalize(prototypes, dim=1)  # [K, D]
    distances = (1 - units @ units.T)[clusters][:, clusters]  # [2N, 2N] d_ij
    mu = distances.mean(1, keepdim=True)  # [2N, 1]
    sigma = distances.std(1, correction=0, keepdim=True).clamp_min(1e-6)  # [2N, 1] above 0
    w = torch.exp(-((distances - mu) ** 2) / (2 * sigma**2))  # [2N, 2N] Eq. 14
    m = len(w) / w.sum(1, keepdim=True)  # [2N, 1] M_i of Eq. 13
    return m * w * (clusters[:, None] != clusters)  # [2N, 2N]


def pgcl(z1, z2, prototypes, temperature=0.5, epsilon=0.05, iterations=3, consistency_weight=0.3):
    """PGCL (Eq. 15) of two views [N, D], with prototypes [K, D] that are parameters."""
    log_p1, q1 = assign(z1, prototypes, temperature, epsilon, iterations)
    log_p2, q2 = assign(z2, prototypes, temperature, epsilon, iterations)
    clusters = torch.cat([q1, q2]).argmax(1)  # [2N]
    contrast = info_nce(z1, z2, temperature, weights_of_negatives(clusters, prototypes))
    return contrast + consistency_weight * consistency(log_p1, log_p2, q1, q2)


def main():
    parser = argparse.ArgumentParser(description="Train an MLP with PGCL on synthetic vectors.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    classes, features, dim = 10, 32, 32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    y = torch.arange(1000) % classes
    x = (0.7 * torch.randn(classes, features)[y] + torch.randn(1000, features)).to(device)
    layers = torch.nn.Linear(features, 64), torch.nn.ReLU(), torch.nn.Linear(64, dim)
    encoder = torch.nn.Sequential(*layers).to(device)
    prototypes = torch.nn.Parameter(torch.empty(classes, dim, device=device))
    torch.nn.init.kaiming_normal_(prototypes)
    optimizer = torch.optim.Adam([*encoder.parameters(), prototypes], lr=3e-3)

    @torch.no_grad()
    def purity():
        clusters = (encoder(x) @ F.normalize(prototypes, dim=1).T).argmax(1)  # [N]
        counts = F.one_hot(clusters.cpu(), classes).T @ F.one_hot(y)  # [K, classes]
        return counts.max(1).values.sum().item() / len(y)

    print(f"Epoch: 000, Purity: {purity():.3f}")
    for epoch in range(1, args.epochs + 1):
        for batch in torch.randperm(len(x), device=device).split(100):
            z1, z2 = (encoder(x[batch] + 0.5 * torch.randn_like(x[batch])) for _ in range(2))
            loss = pgcl(z1, z2, prototypes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch: {epoch:03d}, Loss: {loss.item():.3f}, Purity: {purity():.3f}")


if __name__ == "__main__":
    main()
