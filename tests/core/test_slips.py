"""Common slips give a clear answer: an error on one line, or one warning."""

import warnings

import pytest
import torch

import pgcl_losses
from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes

N, D = 8, 4
NAMES = {
    **vars(pgcl_losses),
    "nan": float("nan"),
    "torch": torch,
    "info_nce": lambda **options: InfoNCE(**options),
    "pgcl": lambda **options: PGCLLoss(D, 3, **options),
    "prototypes": lambda **options: SinkhornPrototypes(D, 3, **options),
    "contrast": lambda **options: PrototypeReweightedNCE(weighting="uniform", **options),
    "z1": torch.linspace(-1, 1, N * D).view(N, D).sin(),
    "z2": torch.linspace(1, 2, N * D).view(N, D).cos(),
    "y": torch.arange(N),
    "D": D,
}

NO_SUCH_ARGUMENT = [
    ("InfoNCE(0.2)", "InfoNCE takes options by name, such as temperature=, but got 0.2 (float)"),
    ("InfoNCE(z1, z2)", "takes options by name, such as temperature=, but got a Tensor of shape"),
    ("PGCLLoss(4, 3, 6.0)", "takes options by name, such as consistency_weight=, but got 6.0"),
    ("PGCLLoss(4, tau=0.1)", "PGCLLoss has no argument tau: did you mean temperature?"),
    ("InfoNCE(tau=0.1)", "InfoNCE has no argument tau: did you mean temperature?"),
    ("InfoNCE(temp=0.1)", "InfoNCE has no argument temp: did you mean temperature?"),
    ("InfoNCE(T=0.1)", "InfoNCE has no argument T: did you mean temperature?"),
    ("InfoNCE(K=10)", "InfoNCE has no argument K: it has temperature, negatives, "),
    ("InfoNCE(memory=10)", "InfoNCE has no argument memory: did you mean memory_size?"),
    ("InfoNCE(gather_distributed=True)", "no argument gather_distributed: did you mean gather?"),
    ("PGCLLoss(4, K=3)", "no argument K: did you mean num_prototypes?"),
    ("PGCLLoss(4, n_prototypes=3)", "no argument n_prototypes: did you mean num_prototypes?"),
    ("PGCLLoss(4, num_prototype=3)", "no argument num_prototype: did you mean num_prototypes?"),
    ("PGCLLoss(4, n_clusters=3)", "no argument n_clusters: did you mean num_prototypes?"),
    ("PGCLLoss(4, lambda_=6)", "no argument lambda_: did you mean consistency_weight?"),
    ("PGCLLoss(4, lambd=6)", "no argument lambd: did you mean consistency_weight?"),
    ("PGCLLoss(4, eps=0.1)", "no argument eps: did you mean epsilon?"),
    ("PGCLLoss(4, queue_sise=9)", "no argument queue_sise: did you mean queue_size?"),
    ("PGCLLoss(embedding_dim=4)", "no argument embedding_dim: did you mean dim?"),
    ("PGCLLoss(embed_dim=4)", "no argument embed_dim: did you mean dim?"),
    ("PGCLLoss(in_features=4)", "no argument in_features: it has dim, num_prototypes, "),
    ("PGCLLoss()", "missing 1 required positional argument: 'dim'"),
    ("PGCLLoss(4, warmup=5)", "warmup: for a warm-up train by InfoNCE first and by PGCLLoss later"),
    ("PGCLLoss(4, device='cuda')", "PGCLLoss has no argument device: it has dim, "),
    ("info_nce()(z1=z1, z2=z2)", "call of InfoNCE has no argument z1: it has views (by position)"),
    ("pgcl()(z1=z1, z2=z2)", "a call of PGCLLoss has no argument z1: it has views (by position)"),
    ("pgcl()(z1, z2=z2)", "a call of PGCLLoss has no argument z2: it has views (by position)"),
    ("pgcl()(views=(z1, z2))", "no argument views: it has views (by position), items, "),
    ("prototypes()(z=z1)", "SinkhornPrototypes has no argument z: it has views (by position)"),
    ("info_nce()(z1, z2, labels=y)", "InfoNCE has no argument labels: did you mean items?"),
    ("pgcl()(z1, z2, targets=y)", "PGCLLoss has no argument targets: did you mean items?"),
    ("pgcl()(z1, z2, item=y)", "PGCLLoss has no argument item: did you mean items?"),
    ("info_nce()(z1, z2, temperature=1)", "a call of InfoNCE has no argument temperature: it has"),
    ("info_nce()(z1, z2, edge_index=y)", "no argument edge_index: did you mean positives?"),
    ("contrast()(z1, z2, labels=y)", "no argument labels: it has views (by position), clusters, "),
    ("sinkhorn(z1, eps=0.1)", "unexpected keyword argument 'eps'"),
]
OPTIONS = [
    ("setattr(pgcl(), 'tau', 0.1)", "PGCLLoss has no option tau: did you mean temperature?"),
    ("setattr(pgcl(), 'foo', 0.1)", "PGCLLoss has no option foo: it has consistency_weight, "),
    ("setattr(pgcl(), 'num_prototypes', 5)", "num_prototypes is 3 and cannot change in this"),
    ("PGCLLoss(z1, z2)", "dim must be a whole number, but got a Tensor of shape"),
    ("PGCLLoss('4')", "dim must be a whole number, but got '4' (str)"),
    ("PGCLLoss(4.0)", "dim must be a whole number, but got 4.0 (float)"),
    ("PGCLLoss(0)", "dim must be at least 1, but got 0"),
    ("PGCLLoss(4, 2.5)", "num_prototypes must be a whole number, or a sequence of them"),
    ("PGCLLoss(4, torch.tensor(3))", "one for each head, but got tensor(3) (Tensor)"),
    ("PGCLLoss(4, True)", "num_prototypes must be a whole number, but got True (bool)"),
    ("PGCLLoss(4, 0)", "num_prototypes must be at least 1, but got 0"),
    ("PGCLLoss(4, [3, 0])", "num_prototypes[1] must be at least 1, but got 0"),
    ("info_nce(temperature=0)", "temperature must be a finite number of at least 1e-30"),
    ("info_nce(temperature=nan)", "at most 1e30, but got nan"),
    ("info_nce(temperature=None)", "at most 1e30, but got None (NoneType)"),
    (
        "info_nce(temperature=torch.ones(1))",
        "temperature must be a number or have shape (), but got (1,)",
    ),
    ("info_nce(temperature=torch.tensor(1))", "a floating-point Tensor, but got torch.int64"),
    ("info_nce(temperature=torch.tensor(-1.0))(z1, z2)", "temperature must be a finite number"),
    ("info_nce(negatives='both')", "negatives must be one of 'all', 'cross', "),
    ("info_nce(queries='second')", "queries must be one of 'all', 'first', but got 'second'"),
    ("info_nce(reduction='avg')", "reduction must be one of 'mean', 'sum', 'none', but got 'avg'"),
    ("info_nce(engine='cuda')", "engine must be one of 'auto', "),
    ("info_nce(debias=1.0)", "debias must be a number from 0 to 0.999, but got 1.0"),
    ("info_nce(gather='yes')", "gather must be True or False, but got 'yes' (str)"),
    ("info_nce(memory_size=10)", "needs the embedding dimension"),
    ("info_nce(memory_size=10, dim=3)(z1, z2)", "z1 has dimension 4, but the memory holds"),
    ("pgcl(weighting='prototypes')", "weighting must be one of 'prototype', 'sample', 'uniform'"),
    ("pgcl(exclude_same_cluster='no')", "exclude_same_cluster must be True or False, but got 'no'"),
    ("pgcl(negative_ranks=3)", "negative_ranks must be None or two positions (first, end), but"),
    ("pgcl(negative_ranks=(2, 8))", "negative_ranks must lie in 0..3, as there are 3 prototypes"),
    ("pgcl(epsilon=0)", "epsilon must be a finite number of at least 1e-30"),
    ("pgcl(queue_size=-1)", "queue_size must be at least 0, but got -1"),
    ("pgcl(queue_size=9)(z1, z2, z1)", "views must be 2 when queue_size > 0, but got 3"),
    ("pgcl(consistency_weight=-1)", "consistency_weight must be a finite number of at least 0"),
    (
        "pgcl(consistency_weight=torch.tensor(6.0))",
        "at least 0, but got tensor(6.) (Tensor)",
    ),
    ("setattr(pgcl(), 'temperature', 0)", "temperature must be a finite number of at least 1e-30"),
    ("sinkhorn(z1, epsilon=0)", "epsilon must be a finite number of at least 1e-30"),
]
INPUTS = [
    ("pgcl()()", "views must be two or more Tensors of shape [N, D], but got 0"),
    ("pgcl()(z1)", "views must be two or more Tensors of shape [N, D], but got 1"),
    ("info_nce()([z1, z2])", "but got 1, a list: unpack it, *views"),
    ("pgcl()(torch.stack([z1, z2]))", "but got 1, a stacked Tensor: unpack it, *views"),
    ("pgcl()((z1, y), (z2, y))", "z1 must be a Tensor of shape [N, D], but got tuple"),
    ("pgcl()({'z': z1}, {'z': z2})", "z1 must be a Tensor of shape [N, D], but got dict"),
    ("info_nce()(z1.numpy(), z2.numpy())", "z1 must be a Tensor of shape [N, D], but got ndarray"),
    ("pgcl()(z1.tolist(), z2.tolist())", "z1 must be a Tensor of shape [N, D], but got list"),
    ("pgcl()(z1, None)", "z2 must be a Tensor of shape [N, D], but got NoneType"),
    ("pgcl()(z1[0], z2[0])", "z1 must have shape [N, D], but got (4,)"),
    ("pgcl()(z1[None], z2[None])", "z1 must have shape [N, D], but got (1, 8, 4)"),
    ("pgcl()(z1.T, z2.T)", "z1 has dimension 8 but prototypes.weight has dimension 4"),
    ("pgcl()(z1, z2.T)", "z2 has shape (4, 8) but z1 has (8, 4): the dimension D must be the same"),
    ("pgcl()(z1[:, :3], z2)", "z2 has shape (8, 4) but z1 has (8, 3): the dimension D must be the"),
    ("info_nce()(z1, z2[:, :3], items=(y, y))", "z1 has (8, 4): the dimension D must be the same"),
    ("pgcl()(z1[:7], z2)", "z1 has (7, 4): row i of every view must be graph i"),
    ("pgcl()(z1, z2.double())", "z2 is torch.float64 but z1 is torch.float32"),
    ("pgcl()(z1.long(), z2.long())", "z1 must be a floating-point Tensor, but got torch.int64"),
    ("pgcl()(z1.to_sparse(), z2)", "z1 must be a dense Tensor, but got layout torch.sparse_coo"),
    ("pgcl()(z1, z2.to('meta'))", "z2 is on meta but z1 is on cpu"),
    ("pgcl().to('meta')(z1, z2)", "z1 is on cpu but prototypes.weight is on meta"),
    ("pgcl()(z1[:0], z2[:0])", "z1 must not be empty, but got shape (0, 4)"),
    ("pgcl()(z1, z2, y)", "z3 is a Tensor of torch.int64 and shape (8,), but a view is [N, D]"),
    ("info_nce()(z1, z2, y.float())", "z3 is a Tensor of torch.float32 and shape (8,), but a view"),
    ("info_nce()(z1, y)", "but a view is [N, D]: give labels as items= (int64)"),
    ("info_nce()(z1, z2, 0.2)", "z3 must be a Tensor of shape [N, D], but got float"),
    ("info_nce()(z1, z2, items=y.tolist())", "items must be a Tensor of shape [N], or a sequence"),
    ("pgcl()(z1, z2, items=y.numpy())", "items must be a Tensor of shape [N], or a sequence"),
    ("info_nce()(z1, z2, items=y.float())", "items must be an int64 Tensor, but got torch.float32"),
    ("info_nce()(z1, z2, items=y[:5])", "items has length 5 but z1 has 8"),
    ("info_nce()(z1, z2, items=(y,))", "items must be 2, one for each set, but got 1"),
    ("info_nce()(z1, z2, items=(y, y.tolist()))", "items[1] must be a Tensor of shape [N], but go"),
    ("info_nce()(z1, z2, items=y[:, None])", "items must have shape [N], but got (8, 1)"),
    ("info_nce()(z1, z2, items=y.to('meta'))", "items is on meta but z1 is on cpu"),
    ("info_nce()(z1, z2, positives=[(0, 1)])", "positives must be a Tensor of shape [2, P]"),
    ("pgcl().remember(z1)", "memory_size is 0: make PGCLLoss(memory_size=...) to remember"),
    ("prototypes()([z1, z2])", "views[0] must be a Tensor of shape [N, D], but got list"),
    ("prototypes().start_from_(nan * z1)", "embeddings must be finite, but there is a NaN or an"),
    ("ConsistencyLoss()(z1, z2)", "assignments[0] must be an Assignment, but got Tensor"),
    ("contrast()(z1, z2, clusters=(y.float(), y))", "clusters[0] must be an int64 Tensor"),
    ("contrast()(z1, z2)", "clusters and assignments are None"),
    ("diagnostics(pgcl()(z1, z2))", "source must be PGCLTerms or a sequence of Assignments"),
    ("sinkhorn(z1[0])", "scores must have shape [N, K], but got (4,)"),
]


@pytest.mark.parametrize(("call", "text"), [*NO_SUCH_ARGUMENT, *OPTIONS, *INPUTS])
def test_an_error_on_one_line(call, text):
    errors = (TypeError, ValueError, AttributeError)
    with pytest.raises(TypeError if (call, text) in NO_SUCH_ARGUMENT else errors) as caught:
        eval(call, NAMES)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("made", "call", "text"),
    [
        ("pgcl()", "loss(nan * z1, z2)", "the embeddings hold NaN or inf"),
        ("pgcl(epsilon=10.0)", "loss(z1, z2 / 0)", "the embeddings hold NaN or inf"),
        ("PGCLLoss(D, 1)", "loss(z1, z2)", "num_prototypes is 1: clusters leave no negatives"),
        (
            "pgcl(consistency_weight=0, contrast_weight=0)",
            "loss(z1, z2)",
            "are both 0, and so is the",
        ),
        ("pgcl()", "loss(z1[:1], z2[:1])", "batches of one graph have no negatives"),
        ("PGCLLoss(D, 9)", "loss(z1, z2)", "8 graphs of a batch and 0 of the queue are balanced"),
        ("pgcl()", "loss(z1.detach(), z2)", "the embeddings had no gradient"),
        ("pgcl(queue_size=9).eval()", "loss(z1, z2)", "its loss is backpropagated in eval() mode"),
    ],
)
def test_one_warning(made, call, text):
    loss = eval(made, NAMES)
    names = {**NAMES, "loss": loss, "z1": NAMES["z1"].clone().requires_grad_()}
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            eval(call, names).backward()
            optimizer.step()
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("PGCLLoss: ")
    assert text in message


def test_terms_are_shown_on_one_line():
    terms = PGCLLoss(D, 3, reduction="none").terms(NAMES["z1"], NAMES["z2"])
    assert repr(terms).startswith("PGCLTerms(loss=[16], contrast=[16], consistency=[16], mean_c")
    assert repr(terms).endswith(", assignments of 2 views)")
    assert "\n" not in repr(terms)
