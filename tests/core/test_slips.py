"""Each mistake is an error on one line, which names the argument and says what came."""

import pytest
import torch
from helpers.marks import assert_error

import pgcl_losses
from pgcl_losses import Batch, InfoNCE, PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes
from pgcl_losses.distributed import Processes

N, D, K = 8, 4, 3


def assigned(heads):
    with torch.no_grad():
        return SinkhornPrototypes(D, heads)(Z1, Z2)


def contrast(**options):
    return PrototypeReweightedNCE(**{"weighting": "uniform"} | options)


def with_pairs(pairs, weights=None):
    return InfoNCE(queries="first")(Z1, Z2, positives=pairs, positive_weights=weights)


Z1 = torch.linspace(-1, 1, N * D).view(N, D).sin()
Z2 = torch.linspace(1, 2, N * D).view(N, D).cos()
BATCH = Batch(Processes([(N,), (N,)]), torch.cat([Z1, Z2]))


class Edges(torch.Tensor):
    """A subclass of Tensor, as PyG's EdgeIndex is one: its values are checked as well."""


NAMES = dict(
    vars(pgcl_losses),
    torch=torch,
    Edges=Edges,
    nan=float("nan"),
    D=D,
    nce=InfoNCE,
    pgcl=lambda **options: PGCLLoss(D, K, **options),
    prototypes=lambda **options: SinkhornPrototypes(D, K, **options),
    contrast=contrast,
    paper=PrototypeReweightedNCE(),
    consistency=pgcl_losses.ConsistencyLoss(),
    with_pairs=with_pairs,
    z1=Z1,
    z2=Z2,
    y=torch.arange(N),
    c=torch.arange(N) % K,
    pair=torch.tensor([[2], [9]]),
    first=assigned(K)[0],
    second=assigned(K)[1],
    double=assigned(K)[1]._replace(log_probs=torch.zeros(N, K).double()),
    short=assigned(K)[1]._replace(log_probs=torch.zeros(2, K)),
    of_heads=assigned((2, 3))[0],
    batch=BATCH,
    one_view=SinkhornPrototypes(D, K)(Batch(Processes([(N,)]), Z1)),
)

# Calls, and the names and values that their messages have.
TYPE_ERRORS = [
    # Arguments that a constructor or a call does not have.
    ("nce(0.2)", "temperature=", "0.2 (float)"),
    ("PGCLLoss(D, 3, z1)", "consistency_weight=", "(8, 4)"),
    ("PGCLLoss()", "'dim'"),
    ("nce(tau=0.1)", "no argument tau", "temperature"),
    ("PGCLLoss(D, lambda_=6)", "no argument lambda_", "consistency_weight"),
    ("PGCLLoss(D, warmup=5)", "warmup", "InfoNCE first"),
    ("nce()(z1=z1, z2=z2)", "no argument z1", "views"),
    ("nce()(views=[z1, z2])", "no argument views", "views (by position)"),
    ("nce()(anchor=z1)", "pgcl_losses.adapters.pygcl.DualBranchContrast takes this loss"),
    ("nce()(z1, z2, targets=y)", "no argument targets", "labels"),
    ("nce()(z1, z2, items=y)", "no argument items", "labels"),
    ("InfoNCE.like(InfoNCE)", "name must be", "got <class"),
    ("InfoNCE.like('GraphCL', tau=0.1)", "no argument tau", "temperature"),
    ("InfoNCE.like('MoCo')", "memory_size=65536", "dim="),
    # Options.
    ("PGCLLoss(4.0)", "dim", "4.0 (float)"),
    ("PGCLLoss(D, ())", "num_prototypes", "() (tuple)"),
    ("nce(temperature=None)", "temperature", "None (NoneType)"),
    ("nce(temperature=torch.ones((), requires_grad=True))", "torch.nn.Parameter(...)"),
    ("nce(process_group='all')", "process_group", "'all'"),
    ("nce(memory_size=10)", "memory_size=10", "dim="),
    ("pgcl(similarity='dot')", "similarity"),
    ("setattr(pgcl(), 'memory', 3)", "memory"),
    # Embeddings.
    ("pgcl()()", "two or more", "got 0"),
    ("nce()(labels=y)", "views must be one or more", "[N, D], but got 0"),
    ("nce()([z1, z2])", "got 1", "*views", "*z.chunk(2)"),
    ("nce(over_positives='supcon')(z1)", "got 1", "one with labels= or positives="),
    ("nce(memory_size=9, dim=D).remember(z1, z2)", "remember takes embeddings", "labels=", "got 2"),
    ("nce(negatives='cross')(z1, labels=y)", "two or more", "negatives='cross'"),
    ("pgcl()(z1, None)", "z2", "NoneType"),
    ("pgcl()(z1.long(), z2.long())", "z1", "torch.int64"),
    ("pgcl()(z1.to_sparse(), z2)", "z1", "torch.sparse_coo"),
    ("pgcl()(z1, z2.double())", "z2 is torch.float64", "z1 is torch.float32"),
    # Labels, and pairs by index.
    ("nce()(z1, z2, labels=y.tolist())", "labels", "(list)"),
    ("nce()(z1, z2, labels=y.int())", "labels", "torch.int32", ".long()"),
    ("with_pairs([[2], [9]])", "positives", "list"),
    ("with_pairs(pair.double())", "positives", "torch.float64"),
    ("with_pairs(pair, torch.ones(2))", "positive_weights", "[1]", "(2,)"),
    ("with_pairs(None, torch.ones(1))", "positive_weights", "positives"),
    ("with_pairs(pair, torch.ones(1) + 0j)", "positive_weights", "real"),
    # Clusters, assignments and batches.
    ("contrast()(z1, z2, clusters=c, assignments=first)", "clusters", "assignments"),
    ("contrast()(z1, z2, assignments=(c, c))", "assignments[0]", "Tensor"),
    ("consistency(first)", "assignments", "got 1", "*assignments"),
    ("consistency(first, double)", "assignments[1]", "torch.float64"),
    ("prototypes()(batch, z2)", "batch"),
    ("nce(similarity='dot')(batch)", "batch", "similarity"),
]
VALUE_ERRORS = [
    # Options.
    ("PGCLLoss(D, [3, 0])", "num_prototypes[1]", "at least 1", "got 0"),
    ("nce(temperature=0)", "temperature", "at least 1e-30", "got 0"),
    *(
        (f"{made}(temperature=torch.tensor({t}))(z1, z2)", f"temperature {why}")
        for made in ("nce", "pgcl")
        for t, why in (("0.0", "must be"), ("nan", "must be"), ("0.2, device='meta'", "is on meta"))
    ),
    ("InfoNCE.like('GraphCLR')", "no script 'GraphCLR'", "did you mean GraphCL"),
    ("InfoNCE.like('SimGCL')", "no script 'SimGCL'", "SELFRec"),
    ("InfoNCE.like('word2vec')", "names are GraphCL, "),
    ("InfoNCE.like('ma-gi', temperature=0.3)", "MAGI", "positives=pairs", "(temperature=0.3, "),
    ("nce(hardness=10**400)", "hardness", "to 100", "got 1000"),
    ("nce(debias=nan)", "debias", "to 0.999", "nan"),
    ("nce(memory_size=-1, dim=D)", "memory_size", "-1"),
    ("nce(negatives='both')", "'all', 'cross', 'memory'", "'both'"),
    ("nce(gather=1)", "gather", "True, False", "got 1"),
    ("pgcl(negative_ranks=(2, 2))", "negative_ranks", "(2, 2)"),
    ("PGCLLoss(D, (2, 8), negative_ranks=(2, 4))", "negative_ranks", "0..2"),
    ("pgcl(negative_ranks=(0, 1))", "negative_ranks", "(0, 1)"),
    ("nce(negatives='memory')", "negatives is 'memory'", "memory_size"),
    (
        "nce(memory_size=4, dim=D)(z1, z2, negative_pairs=pair)",
        "negative_pairs",
        "memory_size",
        "4",
    ),
    ("nce(over_positives='supcon', decoupled=True)(z1, z2)", "'supcon'", "decoupled=False"),
    ("nce(similarity='dot', debias=0.1)(z1, z2)", "debias=0.1", "cosine"),
    ("pgcl(queries='first', reduction='sum')(z1, z2)", "queries='first'", "'mean'"),
    ("pgcl(queries='first', reduction='none')(z1, z2)", "queries='first'", "'mean'"),
    ("pgcl(queue_size=9, queue_views=3)(z1, z2)", "views must be 3", "got 2"),
    ("pgcl(consistency_weight=-1)", "consistency_weight", "-1"),
    ("sinkhorn(z1, epsilon=nan)", "epsilon", "nan"),
    ("nce().remember(z1)", "memory_size is 0"),
    ("torch.func.grad(nce(engine='chunks'))(z1, z2)", "engine='chunks'", "'auto' or 'dense'"),
    # Embeddings.
    ("pgcl()(z1[0], z2[0])", "z1", "[N, D]", "(4,)"),
    ("nce()(z1, z2, y.float())", "z3", "(8,)", "labels="),
    ("nce()(y, z1)", "z1", "(8,)", "labels="),
    ("pgcl()(z1[:0], z2[:0])", "z1 must not be empty", "0 embeddings"),
    ("pgcl()(z1.T, z2.T)", "z1 has dimension 8", "prototypes.weight", "4"),
    ("pgcl()(z1, z2.T)", "z2", "(4, 8)", "(8, 4)"),
    ("pgcl()(z1[:7], z2)", "z1", "(7, 4)", "row i of every view"),
    ("pgcl()(z1, z2.to('meta'))", "z2 is on meta", "z1 is on cpu"),
    ("prototypes().start_from_(nan * z1)", "embeddings", "NaN"),
    ("prototypes().start_from_(z1.T)", "SinkhornPrototypes(dim=8)"),
    ("sinkhorn(z1[0])", "scores", "[N, K]", "(4,)"),
    # Labels, and pairs by index.
    ("nce()(z1, z2, labels=(y, y - 100))", "labels[1]", "-1 or -100", "torch.where"),
    ("nce()(z1, z2, labels=(y,))", "labels must be 2", "got 1"),
    ("nce()(z1, z2, labels=y[0])", "labels", "[N]", "()"),
    ("nce()(z1, z2[:4], labels=y)", "labels has length 8", "z2 has 4"),
    ("with_pairs(pair.T)", "positives", "[2, P]", "(1, 2)"),
    ("with_pairs(pair.flip(0))", "positives", "0 to 7", "0 to 15", "[9, 2]"),
    ("with_pairs(pair - 3)", "positives", "[-1, 6]"),
    ("with_pairs(torch.tensor([[2], [2]]))", "positives", "different", "[2, 2]"),
    ("with_pairs((pair + 8).as_subclass(Edges))", "positives", "0 to 15", "[10, 17]"),
    ("nce()(z1, z2, labels=(y - 1).as_subclass(Edges))", "labels", "-1 or -100"),
    *(
        (
            f"with_pairs(pair, {weight} * torch.ones(1).double())",
            "positive_weights",
            "0 or from 1e-30",
            came,
        )
        for weight, came in (("-1", "-1.0"), ("1e-39", "1e-39"), ("1e-60", "1e-60"), ("nan", "nan"))
    ),
    ("nce()(z1, z2, negative_pairs=pair + 7)", "negative_pairs", "0 to 15", "[9, 16]"),
    # Clusters, assignments and batches.
    ("contrast()(z1, z2, clusters=(c,))", "clusters", "2"),
    ("contrast()(z1, z2, clusters=(c[:2], c))", "clusters[0] has length 2", "z1 has 8"),
    ("paper(z1, z2, clusters=(c, c + 1), prototypes=z1[:3])", "clusters[1]", "0..2", "1..3"),
    ("paper(z1, z2, clusters=(c, c))", "prototypes is None", "weighting='prototype'"),
    ("paper(z1, z2, clusters=(c, c), prototypes=z1[0])", "prototypes", "[K, D]", "(4,)"),
    ("paper(z1, z2, clusters=(c, c), prototypes=z1.T)", "dimension 4", "prototypes", "8"),
    ("contrast()(z1, z2)", "assignments is None", "weighting='uniform'"),
    ("contrast(soft_clusters=True)(z1, z2, clusters=(c, c))", "assignments", "clusters"),
    ("contrast(negative_ranks=(2, 4))(z1, z2, assignments=(first, second))", "0..3"),
    ("consistency(first, short)", "assignments[1]", "(2, 3)"),
    ("consistency(of_heads, of_heads._replace(heads=(3, 2)))", "assignments[1].heads"),
    ("diagnostics([of_heads._replace(heads=(2, 2))])", "5", "(2, 2)"),
    ("diagnostics([of_heads._replace(clusters=c)])", "[N, 2]", "(8,)"),
    ("consistency(batch)", "the batch has no prototypes", "SinkhornPrototypes"),
    ("consistency(one_view)", "1 view", "two or more"),
]
ATTRIBUTE_ERRORS = [
    ("setattr(pgcl(), 'decoupled', True)", "contrast.decoupled"),
    ("setattr(pgcl(), 'num_prototypes', 20)", "num_prototypes", "make a new one"),
    ("setattr(nce(), 'similarity', 'dot')", "similarity is 'cosine'", "make a new one"),
    ("setattr(pgcl(), 'reduction', 'sum')", "contrast.reduction", "consistency.reduction"),
    ("pgcl().decoupled", "'decoupled'"),
    ("setattr(pgcl().prototypes, 'num_prototypes', 5)", "num_prototypes is 3"),
    ("setattr(nce(memory_size=5, dim=D), 'memory_size', 9)", "memory_size is 5"),
]


ERRORS = {TypeError: TYPE_ERRORS, ValueError: VALUE_ERRORS, AttributeError: ATTRIBUTE_ERRORS}


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [(error, call, words) for error, rows in ERRORS.items() for call, *words in rows],
)
def test_an_error_on_one_line_that_names_what_is_wrong(error, call, words):
    assert_error(error, call, words, NAMES)
