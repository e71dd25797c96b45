"""Each mistake is an error on one line, which names the argument and says what came."""

import pytest
import torch

import pgcl_losses
from pgcl_losses import Batch, InfoNCE, PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes
from pgcl_losses.distributed import Processes

N, D, K = 8, 4, 3


def assigned(heads):
    with torch.no_grad():
        return SinkhornPrototypes(D, heads)(Z1, Z2)


Z1 = torch.linspace(-1, 1, N * D).view(N, D).sin()
Z2 = torch.linspace(1, 2, N * D).view(N, D).cos()
BATCH = Batch(Processes([(N,), (N,)]), torch.cat([Z1, Z2]))
NAMES = {
    **vars(pgcl_losses),
    "nan": float("nan"),
    "torch": torch,
    "nce": InfoNCE,
    "pgcl": lambda **options: PGCLLoss(D, K, **options),
    "prototypes": lambda **options: SinkhornPrototypes(D, K, **options),
    "contrast": lambda **options: PrototypeReweightedNCE(**{"weighting": "uniform"} | options),
    "consistency": pgcl_losses.ConsistencyLoss(),
    "z1": Z1,
    "z2": Z2,
    "y": torch.arange(N),
    "c": torch.arange(N) % K,
    "first": assigned(K)[0],
    "second": assigned(K)[1],
    "double": assigned(K)[1]._replace(log_probs=torch.zeros(N, K).double()),
    "short": assigned(K)[1]._replace(log_probs=torch.zeros(2, K)),
    "of_heads": assigned((2, 3))[0],
    "batch": BATCH,
    "one_view": SinkhornPrototypes(D, K)(Batch(Processes([(N,)]), Z1)),
    "numbered": BATCH._replace(clusters=torch.zeros(2 * N, 1).long(), heads=(1,)),
    "D": D,
}

TYPE_ERRORS = [
    # Arguments that a constructor or a call does not have.
    ("nce(0.2)", "InfoNCE takes options by name, such as temperature=, but got 0.2 (float)"),
    ("PGCLLoss(D, 3, z1)", "such as consistency_weight=, but got a Tensor of shape (8, 4)"),
    ("PGCLLoss()", "missing 1 required positional argument: 'dim'"),
    ("nce(tau=0.1)", "InfoNCE has no argument tau: did you mean temperature?"),
    ("PGCLLoss(D, lambda_=6)", "no argument lambda_: did you mean consistency_weight?"),
    ("PGCLLoss(D, warmup=5)", "warmup: for a warm-up train by InfoNCE first and by PGCLLoss later"),
    ("nce()(z1=z1, z2=z2)", "call of InfoNCE has no argument z1: it has views (by position)"),
    ("nce()(anchor=z1)", "PyGCL's contrast models take the losses of pgcl_losses.adapters.pygcl"),
    ("nce()(z1, z2, labels=y)", "InfoNCE has no argument labels: did you mean items?"),
    # Options.
    ("PGCLLoss(4.0)", "dim must be a whole number, but got 4.0 (float)"),
    ("PGCLLoss(D, True)", "num_prototypes must be a whole number, but got True (bool)"),
    ("PGCLLoss(D, '42')", "num_prototypes must be a whole number, or a sequence of them with one"),
    ("PGCLLoss(D, ())", "with one for each head, but got () (tuple)"),
    ("nce(temperature=None)", "at most 1e30, but got None (NoneType)"),
    ("nce(temperature=torch.ones((), requires_grad=True))", "learns: give torch.nn.Parameter(...)"),
    ("nce(process_group='all')", "process_group must be a ProcessGroup or None, but got 'all'"),
    ("nce(memory_size=10)", "memory_size=10 needs the embedding dimension, dim="),
    ("pgcl(negative_ranks=3)", "negative_ranks must be None or two positions (first, end), but"),
    ("setattr(pgcl(), 'memory', 3)", "memory"),
    # Embeddings.
    ("pgcl()()", "views must be two or more Tensors of shape [N, D], but got 0"),
    ("prototypes()()", "views must be one or more Tensors of shape [N, D], but got 0"),
    ("nce()([z1, z2])", "but got 1: unpack a list or a stack by *views"),
    ("nce()(torch.cat([z1, z2]))", "torch.cat of two views by *z.chunk(2)"),
    (
        "nce(negatives='cross')(z1, items=y)",
        "two or more Tensors of shape [N, D], as negatives='cr",
    ),
    ("contrast()(torch.stack([z1, z2]))", "but got 1: unpack a list or a stack by *views"),
    ("pgcl()(z1, None)", "z2 must be a Tensor of shape [N, D], but got NoneType"),
    ("pgcl()(z1.long(), z2.long())", "z1 must be a floating-point Tensor, but got torch.int64"),
    ("pgcl()(z1.to_sparse(), z2)", "z1 must be a dense Tensor, but got layout torch.sparse_coo"),
    ("pgcl()(z1, z2.double())", "z2 is torch.float64 but z1 is torch.float32"),
    # Items.
    ("nce()(z1, z2, items=y.tolist())", "items must be a Tensor of shape [N], or a sequence of"),
    ("nce()(z1, z2, items=y.float())", "items must be an int64 Tensor, but got torch.float32"),
    ("nce()(z1, z2, items=y.int())", "items must be an int64 Tensor, but got torch.int32: use .l"),
    ("nce()(z1, z2, items=(y, None))", "items[1] must be a Tensor of shape [N], but got NoneType"),
    # Clusters, assignments and batches.
    ("contrast()(z1, z2, clusters=c, assignments=first)", "clusters and assignments both hold cl"),
    ("contrast()(z1, z2, assignments=(c, c))", "assignments[0] must be an Assignment, but got"),
    ("consistency(first)", "assignments must be two or more, but got 1: give *assignments"),
    ("consistency(first, z2)", "assignments[1] must be an Assignment, but got Tensor"),
    ("consistency(first, double)", "[1].log_probs is torch.float64 but assignments[0].log_probs i"),
    ("diagnostics([])", "source must be PGCLTerms or a sequence of Assignments, but got list"),
    ("prototypes()(batch, z2)", "a batch has all views and items in it: give it alone"),
    ("consistency(batch, first)", "a batch has all views and items in it: give it alone"),
    ("nce(memory_size=8, dim=D)(batch)", "a batch has a memory and a similarity of its own"),
]
VALUE_ERRORS = [
    # Options.
    ("PGCLLoss(D, [3, 0])", "num_prototypes[1] must be at least 1, but got 0"),
    ("nce(temperature=0)", "temperature must be a finite number of at least 1e-30, at most 1e30"),
    ("nce(temperature=10**400)", "temperature must be a finite number of at least 1e-30"),
    ("nce(negatives='both')", "negatives must be one of 'all', 'cross', 'memory', 'given', but"),
    ("nce(gather='yes')", "gather must be one of True, False, but got 'yes'"),
    ("nce(gather=1)", "gather must be one of True, False, but got 1"),
    ("nce(engine=None)", "engine must be one of 'auto', 'dense', 'blocks', but got None"),
    ("pgcl(negative_ranks=(2, 8))", "negative_ranks must lie in 0..3, as there are 3 prototypes"),
    ("pgcl(negative_ranks=(2, 2))", "negative_ranks must be (first, end) with first < end, but"),
    ("PGCLLoss(D, (2, 8), negative_ranks=(2, 4))", "negative_ranks must lie in 0..2, as there are"),
    ("nce(negatives='memory')", "negatives is 'memory', which needs a memory: memory_size is 0"),
    ("pgcl(queries='first', reduction='none')(z1, z2)", "queries='first'"),
    ("pgcl(negatives='memory')", "negatives is 'memory', which needs a memory: memory_size is 0"),
    ("pgcl(negative_ranks=(0, 1))", "negative_ranks is (0, 1), only the query's own"),
    ("pgcl(queue_size=9, queue_views=3)(z1, z2)", "views must be 3 when queue_size > 0, but got 2"),
    ("pgcl(consistency_weight=-1)", "consistency_weight must be a finite number of at least 0"),
    ("sinkhorn(z1, epsilon=nan)", "epsilon must be a finite number of at least 1e-30"),
    ("sinkhorn(z1, iterations=0)", "iterations must be at least 1, but got 0"),
    # Embeddings.
    ("pgcl()(z1[0], z2[0])", "z1 must have shape [N, D], but got (4,)"),
    ("nce()(z1, z2, y)", "z3 must have shape [N, D], but got (8,): give labels as items="),
    ("pgcl()(z1[:0], z2[:0])", "z1 must not be empty, but got shape (0, 4)"),
    ("pgcl()(z1.T, z2.T)", "z1 has dimension 8 but prototypes.weight has dimension 4"),
    ("pgcl()(z1, z2.T)", "z2 has shape (4, 8) but z1 has (8, 4): the dimension D must be the same"),
    ("pgcl()(z1[:7], z2)", "z1 has (7, 4): row i of every view must be graph i"),
    ("pgcl()(z1, z2.to('meta'))", "z2 is on meta but z1 is on cpu"),
    ("prototypes()(z1.T)", "z1 has dimension 8 but prototypes.weight has dimension 4"),
    ("prototypes().assign(z1.T)", "z has dimension 8 but weight has dimension 4"),
    ("prototypes().start_from_(nan * z1)", "embeddings must be finite, but there is a NaN or an"),
    ("prototypes().start_from_(z1.T)", "weight has dimension 4: make SinkhornPrototypes(dim=8)"),
    ("sinkhorn(z1[0])", "scores must have shape [N, K], but got (4,)"),
    # Items.
    ("nce()(z1, z2, items=y - 1)", "torch.where(labels >= 0, labels, num_classes + ids)"),
    ("nce()(z1, z2, items=(y, y - 100))", "items[1] must not hold -1 or -100: give embeddings"),
    ("pgcl()(z1, z2, items=y - 1)", "items must not hold -1 or -100: give embeddings"),
    ("nce()(z1, z2, items=(y,))", "items must be 2, one for each set, but got 1"),
    ("nce()(z1, z2, items=y[0])", "items must have shape [N], but got ()"),
    ("pgcl()(z1, z2, items=y[:, None])", "items must have shape [N], but got (8, 1)"),
    ("nce()(z1, z2, items=y.to('meta'))", "items is on meta but z1 is on cpu"),
    # Clusters, assignments and batches.
    ("contrast(soft_clusters=True)(z1, z2, clusters=(c, c))", "or clusters if neither negative_"),
    ("contrast(negative_ranks=(2, 4))(z1, z2, assignments=(first, second))", "must lie in 0..3"),
    ("contrast()(z1[:5], z2[:5], assignments=(first, second))", "has length 8 but z1 has 5"),
    ("consistency(first, short)", "[1].log_probs has shape (2, 3) but assignments[0].log_probs ha"),
    (
        "consistency(of_heads, of_heads._replace(heads=(3, 2)))",
        "assignments[1].heads must be the s",
    ),
    ("diagnostics([of_heads._replace(heads=(2, 2))])", "5 prototypes together, but got (2, 2)"),
    ("diagnostics([of_heads._replace(clusters=c)])", "must have shape [N, 2], a column for each"),
    ("diagnostics([first._replace(clusters=c + 1)])", "assignments[0].clusters must lie in 0..2"),
    ("diagnostics([first], z2[:3, 0])", "prototypes must have shape [K, D], but got (3,)"),
    ("diagnostics([first], z2)", "prototypes are 8, but assignments are to 3"),
    ("consistency(batch)", "the batch has no prototypes and targets: call SinkhornPrototypes on"),
    ("consistency(one_view)", "the batch has 1 view, but the consistency is between two or more"),
    ("contrast()(batch)", "the batch has no prototypes and targets"),
    ("contrast(weighting='prototype')(numbered)", "the batch has no prototypes and targets"),
    ("contrast(soft_clusters=True)(numbered)", "the batch has no prototypes and targets"),
]
ATTRIBUTE_ERRORS = [
    ("setattr(pgcl(), 'tau', 0.1)", "PGCLLoss has no option tau: did you mean temperature?"),
    ("setattr(pgcl(), 'foo', 0.1)", "PGCLLoss has no option foo: it has consistency_weight, "),
    ("setattr(pgcl(), 'eps', 0.1)", "PGCLLoss has no option eps: did you mean epsilon?"),
    ("setattr(pgcl(), 'decoupled', True)", "no option of PGCLLoss: set its contrast.decoupled"),
    ("setattr(pgcl(), 'reduction', 'sum')", "contrast.reduction and consistency.reduction"),
    ("pgcl().decoupled", "'PGCLLoss' object has no attribute 'decoupled'"),
    ("setattr(pgcl().prototypes, 'K', 5)", "no option K: did you mean num_prototypes?"),
    ("setattr(pgcl().prototypes, 'num_prototypes', 5)", "num_prototypes is 3 and cannot change"),
    ("setattr(pgcl().prototypes, 'heads', (1, 2))", "heads"),
]


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [
        *((TypeError, *row) for row in TYPE_ERRORS),
        *((ValueError, *row) for row in VALUE_ERRORS),
        *((AttributeError, *row) for row in ATTRIBUTE_ERRORS),
    ],
)
def test_an_error_on_one_line(error, call, text):
    with pytest.raises(error) as caught:
        eval(call, NAMES)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
