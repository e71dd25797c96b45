"""Each mistake is an error on one line, which names the argument and says what came."""

from functools import partial

import pytest
import torch
from helpers.marks import assert_error, slips

from pgcl_losses import (
    Assignments,
    Batch,
    ConsistencyLoss,
    InfoNCE,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    diagnostics,
    sinkhorn,
)
from pgcl_losses.base.distributed import Processes
from pgcl_losses.pairs.rows import Pairs

N, D, K = 8, 4, 3
pgcl, prototypes = partial(PGCLLoss, D, K), partial(SinkhornPrototypes, D, K)
contrast = partial(PrototypeReweightedNCE, weighting="uniform")
paper, consistency = PrototypeReweightedNCE(), ConsistencyLoss()


def assigned(heads):
    with torch.no_grad():
        return SinkhornPrototypes(D, heads)(Z1, Z2)


def with_pairs(pairs, weights=None):
    return InfoNCE(queries="first")(Z1, Z2, positives=pairs, positive_weights=weights)


class Edges(torch.Tensor):
    """A subclass of Tensor, as PyG's EdgeIndex is one: its values are checked as well."""


Z1 = torch.linspace(-1, 1, N * D).view(N, D).sin()
Z2 = torch.linspace(1, 2, N * D).view(N, D).cos()
LABELS, CLUSTERS = torch.arange(N), torch.arange(N) % K
PAIR = torch.tensor([[2], [9]])
BATCH = Batch(torch.cat([Z1, Z2]), Processes([(N,), (N,)]), Pairs((N, N)))
ONE_VIEW = SinkhornPrototypes(D, K)(Batch(Z1, Processes([(N,)]), Pairs((N,))))
FIRST, SECOND = BOTH = assigned(K)
DOUBLE = SECOND._replace(log_probs=torch.zeros(N, K).double())
SHORT = SECOND._replace(log_probs=torch.zeros(2, K))
OF_HEADS = assigned((2, 3))[0]

# Calls, and the names and values that their messages have.
TYPE_ERRORS = [
    # Arguments that a constructor or a call does not have.
    (lambda: InfoNCE(0.2), "temperature=", "0.2 (float)"),
    (lambda: PGCLLoss(D, 3, Z1), "consistency_weight=", "(8, 4)"),
    (lambda: PGCLLoss(), "'dim'"),
    (lambda: InfoNCE(tau=0.1), "no argument tau", "temperature"),
    (lambda: PGCLLoss(D, lambda_=6), "no argument lambda_", "consistency_weight"),
    (lambda: PGCLLoss(D, warmup=5), "warmup", "InfoNCE first"),
    (lambda: InfoNCE()(z1=Z1, z2=Z2), "no argument z1", "views"),
    (lambda: InfoNCE()(views=[Z1, Z2]), "no argument views", "views (by position)"),
    (lambda: InfoNCE()(anchor=Z1), "pgcl_losses.adapters.pygcl.DualBranchContrast takes this loss"),
    (lambda: InfoNCE()(Z1, Z2, targets=LABELS), "no argument targets", "labels"),
    (lambda: InfoNCE()(Z1, Z2, items=LABELS), "no argument items", "labels"),
    (lambda: InfoNCE.like(InfoNCE), "name must be", "got <class"),
    (lambda: InfoNCE.like("GraphCL", tau=0.1), "no argument tau", "temperature"),
    (lambda: InfoNCE.like("MoCo"), "memory_size=65536", "dim="),
    # Options.
    (lambda: PGCLLoss(4.0), "dim", "4.0 (float)"),
    (lambda: PGCLLoss(D, ()), "num_prototypes", "() (tuple)"),
    (lambda: InfoNCE(temperature=None), "temperature", "None (NoneType)"),
    (lambda: InfoNCE(temperature=torch.ones((), requires_grad=True)), "torch.nn.Parameter(...)"),
    (lambda: InfoNCE(process_group="all"), "process_group", "'all'"),
    (lambda: InfoNCE(memory_size=10), "memory_size=10", "dim="),
    (lambda: pgcl(similarity="dot"), "similarity"),
    (lambda: setattr(pgcl(), "memory", 3), "memory"),
    # Embeddings.
    (lambda: pgcl()(), "two or more", "got 0"),
    (lambda: InfoNCE()(labels=LABELS), "views must be one or more", "[N, D], but got 0"),
    (lambda: InfoNCE()([Z1, Z2]), "got 1", "*views", "*z.chunk(2)"),
    (lambda: InfoNCE(over_positives="supcon")(Z1), "got 1", "one with labels= or positives="),
    (
        lambda: InfoNCE(memory_size=9, dim=D).remember(Z1, Z2),
        "remember takes embeddings",
        "labels=",
        "got 2",
    ),
    (lambda: InfoNCE(negatives="cross")(Z1, labels=LABELS), "two or more", "negatives='cross'"),
    (lambda: pgcl()(Z1, None), "z2", "NoneType"),
    (lambda: pgcl()(Z1.long(), Z2.long()), "z1", "torch.int64"),
    (lambda: pgcl()(Z1.to_sparse(), Z2), "z1", "torch.sparse_coo"),
    (lambda: pgcl()(Z1, Z2.double()), "z2 is torch.float64", "z1 is torch.float32"),
    # Labels, and pairs by index.
    (lambda: InfoNCE()(Z1, Z2, labels=LABELS.tolist()), "labels", "(list)"),
    (lambda: InfoNCE()(Z1, Z2, labels=LABELS.int()), "labels", "torch.int32", ".long()"),
    (lambda: with_pairs([[2], [9]]), "positives", "list"),
    (lambda: with_pairs(PAIR.double()), "positives", "torch.float64"),
    (lambda: with_pairs(PAIR, torch.ones(2)), "positive_weights", "[1]", "(2,)"),
    (lambda: with_pairs(None, torch.ones(1)), "positive_weights", "positives"),
    (lambda: with_pairs(PAIR, torch.ones(1) + 0j), "positive_weights", "real"),
    # Clusters, assignments and batches.
    (lambda: contrast()(Z1, Z2, BOTH, clusters=CLUSTERS), "leave clusters= out"),
    (lambda: paper(Z1, Z2, BOTH, prototypes=torch.ones(K, D)), "leave prototypes= out"),
    (lambda: paper(Z1, Z2, prototypes=prototypes()), "prototypes", "SinkhornPrototypes"),
    (lambda: paper(Z1, Z2, tuple(BOTH)), "as it is", "contrast(z1, z2, a)"),
    (lambda: paper(Z1, Z2, *BOTH), "as it is", "contrast(z1, z2, a)"),
    (lambda: paper(Z1, Z2, BOTH, assignments=BOTH), "z3", "Assignments"),
    (lambda: paper(BOTH, assignments=BOTH), "give them alone"),
    (lambda: paper(BOTH, Z1, Z2), "after the views, as in contrast(z1, z2, a)"),
    (lambda: paper(Z1, Z2, assignments=(FIRST, SECOND)), "Assignments", "tuple", "clusters="),
    (lambda: consistency(tuple(BOTH)), "assignments", "got 1", "consistency(a)"),
    (lambda: consistency(BOTH, BOTH), "assigned in one call"),
    (lambda: consistency(FIRST, DOUBLE), "assignments[1]", "torch.float64"),
    (lambda: prototypes()(BATCH, Z2), "batch"),
    (lambda: InfoNCE(similarity="dot")(BATCH), "batch", "similarity"),
]
VALUE_ERRORS = [
    (
        lambda: InfoNCE(negatives="cross")(Z1, Z2, positives=torch.tensor([[0, 9], [10, 11]])),
        "positives has the pair [9, 11] within one set",
        "negatives='cross'",
        "add len(z1) = 8",
    ),
    (lambda: InfoNCE.like(""), "no script ''", "names are GraphCL"),
    # Options that contradict each other are an error of the constructor.
    (lambda: InfoNCE(decoupled=True, over_positives="supcon"), "decoupled=False"),
    (lambda: contrast(decoupled=True, over_positives="supcon"), "decoupled=False"),
    (lambda: pgcl(decoupled=True, over_positives="supcon"), "decoupled=False"),
    (lambda: InfoNCE(similarity="dot", debias=0.1), "debias=0.1", "cosines"),
    (lambda: InfoNCE(dim=4), "dim=4", "memory_size is 0"),
    (
        lambda: InfoNCE(memory_size=4, dim=D).remember(Z1, labels=LABELS - 1),
        "labels must not hold -1",
    ),
    # Options.
    (lambda: PGCLLoss(D, [3, 0]), "num_prototypes[1]", "at least 1", "got 0"),
    (lambda: InfoNCE(temperature=0), "temperature", "at least 1e-30", "got 0"),
    (lambda: InfoNCE.like("GraphCLR"), "no script 'GraphCLR'", "did you mean GraphCL"),
    (lambda: InfoNCE.like("pgcl"), "no script 'pgcl'", "PGCL is PGCLLoss(dim)"),
    (lambda: InfoNCE.like("SimGCL"), "no script 'SimGCL'", "SELFRec"),
    (lambda: InfoNCE.like("word2vec"), "names are GraphCL, "),
    (
        lambda: InfoNCE.like("ma-gi", temperature=0.3),
        "MAGI",
        "positives=pairs",
        "(temperature=0.3, ",
    ),
    (lambda: InfoNCE(hardness=10**400), "hardness", "to 100", "got 1000"),
    (lambda: InfoNCE(debias=torch.nan), "debias", "to 0.999", "nan"),
    (lambda: InfoNCE(memory_size=-1, dim=D), "memory_size", "-1"),
    (lambda: InfoNCE(negatives="both"), "'all', 'cross', 'memory'", "'both'"),
    (lambda: InfoNCE(gather=1), "gather", "True, False", "got 1"),
    (lambda: InfoNCE(negatives="memory"), "negatives is 'memory'", "memory_size"),
    (
        lambda: InfoNCE(memory_size=4, dim=D)(Z1, Z2, negative_pairs=PAIR),
        "negative_pairs",
        "memory_size",
        "4",
    ),
    (
        lambda: InfoNCE(over_positives="supcon", decoupled=True)(Z1, Z2),
        "'supcon'",
        "decoupled=False",
    ),
    (lambda: InfoNCE(similarity="dot", debias=0.1)(Z1, Z2), "debias=0.1", "cosine"),
    (lambda: pgcl(queries="first", reduction="sum")(Z1, Z2), "queries='first'", "'mean'"),
    (lambda: pgcl(queries="first", reduction="none")(Z1, Z2), "queries='first'", "'mean'"),
    (lambda: pgcl(queue_size=9, queue_views=3)(Z1, Z2), "views must be 3", "got 2"),
    (lambda: pgcl(consistency_weight=-1), "consistency_weight", "-1"),
    (lambda: sinkhorn(Z1, epsilon=torch.nan), "epsilon", "nan"),
    (lambda: InfoNCE().remember(Z1), "memory_size is 0"),
    (
        lambda: torch.func.grad(InfoNCE(engine="chunks"))(Z1, Z2),
        "engine='chunks'",
        "'auto' or 'dense'",
    ),
    # Embeddings.
    (lambda: pgcl()(Z1[0], Z2[0]), "z1", "[N, D]", "(4,)"),
    (lambda: InfoNCE()(Z1, Z2, LABELS.float()), "z3", "(8,)", "labels="),
    (lambda: InfoNCE()(LABELS, Z1), "z1", "(8,)", "labels="),
    (lambda: pgcl()(Z1[:0], Z2[:0]), "z1 must not be empty", "0 embeddings"),
    (lambda: pgcl()(Z1.T, Z2.T), "z1 has dimension 8", "prototypes.weight", "4"),
    (lambda: pgcl()(Z1, Z2.T), "z2", "(4, 8)", "(8, 4)"),
    (lambda: pgcl()(Z1[:7], Z2), "z1", "(7, 4)", "row i of every view"),
    (lambda: pgcl()(Z1, Z2.to("meta")), "z2 is on meta", "z1 is on cpu"),
    (lambda: prototypes().start_from_(torch.nan * Z1), "embeddings", "NaN"),
    (lambda: prototypes().assign(torch.nan * Z1), "z must be finite", "NaN"),
    (lambda: prototypes().start_from_(Z1.T), "SinkhornPrototypes(dim=8)"),
    (lambda: prototypes().start_from_(Z1[:0]), "embeddings must not be empty", "0 embeddings"),
    (lambda: InfoNCE(memory_size=5, dim=D).remember(Z1[:0]), "embeddings must not be empty"),
    (lambda: sinkhorn(Z1[0]), "scores", "[N, K]", "(4,)"),
    # Labels, and pairs by index.
    (
        lambda: InfoNCE()(Z1, Z2, labels=(LABELS, LABELS - 100)),
        "labels[1]",
        "-1 or -100",
        "torch.where",
    ),
    (lambda: InfoNCE()(Z1, Z2, labels=(LABELS,)), "labels must be 2", "got 1"),
    (lambda: InfoNCE()(Z1, Z2, labels=LABELS[0]), "labels", "[N]", "()"),
    (lambda: InfoNCE()(Z1, Z2[:4], labels=LABELS), "labels has length 8", "z2 has 4"),
    (lambda: with_pairs(PAIR.T), "positives", "[2, P]", "(1, 2)"),
    (lambda: with_pairs(PAIR.flip(0)), "positives", "0 to 7", "0 to 15", "[9, 2]"),
    (lambda: with_pairs(PAIR - 3), "positives", "[-1, 6]"),
    (lambda: with_pairs(torch.tensor([[2], [2]])), "positives", "different", "[2, 2]"),
    (lambda: with_pairs((PAIR + 8).as_subclass(Edges)), "positives", "0 to 15", "[10, 17]"),
    (lambda: InfoNCE()(Z1, Z2, labels=(LABELS - 1).as_subclass(Edges)), "labels", "-1 or -100"),
    (lambda: InfoNCE()(Z1, Z2, negative_pairs=PAIR + 7), "negative_pairs", "0 to 15", "[9, 16]"),
    # Clusters, assignments and batches.
    (lambda: contrast()(Z1, Z2, clusters=(CLUSTERS,)), "clusters", "2"),
    (
        lambda: contrast()(Z1, Z2, clusters=(CLUSTERS[:2], CLUSTERS)),
        "clusters[0] has length 2",
        "z1 has 8",
    ),
    (
        lambda: paper(Z1, Z2, clusters=(CLUSTERS, CLUSTERS + 1), prototypes=Z1[:3]),
        "clusters[1]",
        "0..2",
        "1..3",
    ),
    (
        lambda: paper(Z1, Z2, clusters=(CLUSTERS, CLUSTERS)),
        "prototypes is None",
        "weighting='prototype'",
    ),
    (
        lambda: paper(Z1, Z2, clusters=(CLUSTERS, CLUSTERS), prototypes=Z1[0]),
        "prototypes",
        "[K, D]",
        "(4,)",
    ),
    (
        lambda: paper(Z1, Z2, clusters=(CLUSTERS, CLUSTERS), prototypes=Z1.T),
        "dimension 4",
        "prototypes",
        "8",
    ),
    (lambda: contrast()(Z1, Z2), "assignments is None", "weighting='uniform'"),
    (lambda: paper(Z1[:5], Z2[:5], BOTH), "2 views of 8 graphs", "2 views of 5", "same graphs"),
    (lambda: paper(Z1, Z2, Z1, BOTH), "2 views of 8 graphs", "3 views of 8"),
    (lambda: paper(Z1, Z2, Assignments(BATCH)), "SinkhornPrototypes"),
    (lambda: paper(prototypes()(Z1)), "views must be two or more"),
    (lambda: consistency(FIRST, SHORT), "assignments[1]", "(2, 3)"),
    (lambda: consistency(OF_HEADS, OF_HEADS._replace(heads=(3, 2))), "assignments[1].heads"),
    (lambda: diagnostics([OF_HEADS._replace(heads=(2, 2))]), "5", "(2, 2)"),
    (lambda: diagnostics([OF_HEADS._replace(clusters=CLUSTERS)]), "[N, 2]", "(8,)"),
    (lambda: consistency(BATCH), "the batch has no prototypes", "SinkhornPrototypes"),
    (lambda: consistency(ONE_VIEW), "1 view", "two or more"),
]
ATTRIBUTE_ERRORS = [
    (lambda: setattr(pgcl(), "decoupled", True), "contrast.decoupled"),
    (lambda: setattr(pgcl(), "num_prototypes", 20), "num_prototypes", "make a new one"),
    (lambda: setattr(InfoNCE(), "similarity", "dot"), "similarity is 'cosine'", "make a new one"),
    (lambda: setattr(pgcl(), "reduction", "sum"), "contrast.reduction", "consistency.reduction"),
    (lambda: pgcl().decoupled, "'decoupled'"),
    (lambda: setattr(pgcl().prototypes, "num_prototypes", 5), "num_prototypes is 3"),
    (lambda: setattr(InfoNCE(memory_size=5, dim=D), "memory_size", 9), "memory_size is 5"),
]


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        *slips(TypeError, TYPE_ERRORS),
        *slips(ValueError, VALUE_ERRORS),
        *slips(AttributeError, ATTRIBUTE_ERRORS),
    ],
)
def test_an_error_on_one_line_that_names_what_is_wrong(error, call, words):
    assert_error(error, call, words)


@pytest.mark.parametrize("loss", [InfoNCE, pgcl], ids=["InfoNCE", "PGCLLoss"])
@pytest.mark.parametrize(
    ("temperature", "device", "words"),
    [
        (0.0, "cpu", "temperature must be"),
        (torch.nan, "cpu", "temperature must be"),
        (0.2, "meta", "temperature is on meta"),
    ],
)
def test_a_tensor_that_is_no_temperature(loss, temperature, device, words):
    module = loss(temperature=torch.tensor(temperature, device=device))
    assert_error(ValueError, lambda: module(Z1, Z2), [words])


@pytest.mark.parametrize("weight", [-1.0, 1e-39, 1e-60, torch.nan])
def test_a_weight_of_no_positive(weight):
    weights = torch.tensor([weight], dtype=torch.float64)
    words = ["positive_weights", "0 or from 1e-30", str(weight)]
    assert_error(ValueError, lambda: with_pairs(PAIR, weights), words)


@pytest.mark.parametrize(
    ("loss", "wrong", "right"),
    [
        (InfoNCE(), "tau", "temperature"),
        (pgcl(), "tau", "temperature"),
        (pgcl(), "lam", "consistency_weight"),
        (pgcl(), "K", "num_prototypes"),
        (prototypes(), "eps", "epsilon"),
    ],
)
def test_a_wrong_name_cannot_be_assigned(loss, wrong, right):
    assert_error(AttributeError, lambda: setattr(loss, wrong, 0.5), [wrong, f"set {right}"])


def test_a_subclass_has_names_of_its_own():
    class Mine(InfoNCE):
        pass

    loss = Mine()
    loss.tau = 0.5
    assert loss.tau == 0.5
