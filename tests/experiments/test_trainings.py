"""What a row of an experiment trains: its own loss, on its own graphs, with all parameters.

Expected values are of formulas and loops that share nothing with the experiments.
"""

import numpy as np
import pytest
import torch
from helpers import formulas, oracle
from helpers.node_sets import write_photo
from torch_geometric.data import Batch

from experiments.clusters import study as clusters
from experiments.common import graphs
from experiments.common.digits import graphs_of_digits
from experiments.false_negatives import study as false_negatives
from experiments.few_labels import study as few_labels
from experiments.nodes import grace
from experiments.warm_up import study as warm_up
from pgcl_losses import PGCLLoss

DIGITS = graphs_of_digits()[:100]
LABELS = np.array([int(graph.y) for graph in DIGITS])
TAU = 0.37  # the default of nothing
OF_ROWS = {
    "consistency alone": {"contrast_weight": 0.0},
    "sample-reweighted": {
        "weighting": "sample",
        "exclude_same_cluster": False,
        "consistency_weight": 0.0,
    },
    "prototype-reweighted": {"consistency_weight": 0.0},
    "InfoNCE + consistency": {"weighting": "uniform", "exclude_same_cluster": False},
    "sample-reweighted + consistency": {"weighting": "sample", "exclude_same_cluster": False},
    "PGCL": {},
}


@pytest.fixture(autouse=True)
def digits(monkeypatch):
    """Few graphs of digits in place of each set, and nothing is measured."""
    for study in (few_labels, false_negatives, clusters):
        monkeypatch.setattr(study, "graphs_of", lambda file: DIGITS)
    monkeypatch.setattr(warm_up, "graphs_of", lambda name, file: DIGITS)
    for study in (false_negatives, warm_up):
        monkeypatch.setattr(study, "measured", lambda *given: {"labels_1": 0.0})
    monkeypatch.setattr(warm_up, "within_k_means", lambda *given: 0.0)
    monkeypatch.setattr(grace, "linear", lambda *given: 0.0)
    monkeypatch.setattr(grace, "measured", lambda *given: {"labels_1": 0.0})
    for number, graph in enumerate(DIGITS):
        graph.number = number


@pytest.fixture
def optimized(monkeypatch):
    """The parameters of each optimizer of Adam's that an experiment makes."""
    found, adam = [], torch.optim.Adam

    def remembered(parameters, **options):
        optimizer = adam(parameters, **options)
        found.append({id(p) for group in optimizer.param_groups for p in group["params"]})
        return optimizer

    monkeypatch.setattr(torch.optim, "Adam", remembered)
    return found


def info_nce(z1, z2, tau):
    """-log of the positive's part of all 2N - 1 others, for each of the 2N."""
    z = [row / row.norm() for row in torch.cat([z1, z2]).double()]
    n, losses = len(z1), []
    for i, query in enumerate(z):
        powers = [torch.exp(query @ key / tau) for key in z]
        losses.append(-torch.log(powers[(i + n) % (2 * n)] / (sum(powers) - powers[i])))
    return sum(losses) / len(losses)


def expected(row, loss, z1, z2):
    if row == graphs.INFO_NCE:
        return info_nce(z1, z2, TAU)
    if row == graphs.GRAPH_CL:
        return formulas.graphcl(z1.double(), z2.double(), TAU)
    options = {"consistency_weight": 1.7, **OF_ROWS[row]}
    return oracle.pgcl([z1, z2], [loss.prototypes.weight], temperature=TAU, **options).loss


@pytest.mark.parametrize("row", [graphs.INFO_NCE, graphs.GRAPH_CL, *graphs.ABLATION])
def test_a_row_trains_its_own_loss_at_its_temperature(row):
    torch.manual_seed(0)
    z1, z2 = torch.randn(2, 12, graphs.DIM)
    setting = {"temperature": TAU, "consistency_weight": 1.7, "freeze_epochs": 0}
    config = graphs.options_of(row, graphs.SETTING | setting)
    model = graphs.build(config, graphs.GIN(3), batches=2)
    assert model.loss(z1, z2).item() == pytest.approx(
        expected(row, model.loss, z1, z2).item(), rel=1e-5
    )


def phases(config):
    """The losses of a training with a warm-up, by hand from its two modules."""
    torch.manual_seed(3)
    z1, z2 = torch.randn(2, 12, warm_up.DIM)
    found = [loss(z1, z2).item() for loss in warm_up.losses_of(config | {"seed": 3})]
    torch.manual_seed(3)
    z1, z2 = torch.randn(2, 12, warm_up.DIM).double()
    with torch.random.fork_rng(devices=[]):
        prototypes = PGCLLoss(warm_up.DIM, config.get("num_prototypes", 2)).prototypes.weight
    return found, z1, z2, prototypes


def test_the_rows_with_a_warm_up_train_their_own_losses():
    for config, (first, second) in (
        (warm_up.info_nce("digits"), (1.0, 1.0)),
        (warm_up.schedule("digits", 2.0, 0.5), (2.0, 0.5)),
    ):
        found, z1, z2, _ = phases(config)
        assert found == pytest.approx([info_nce(z1, z2, tau).item() for tau in (first, second)])
    of_pgcl, z1, z2, c = phases(warm_up.pgcl("digits", 20))
    whole = oracle.pgcl([z1, z2], [c])
    assert of_pgcl == pytest.approx([whole.loss.item()] * 2, rel=1e-5)
    consistency = 0.3 * whole.consistency.item()
    for form in warm_up.FORMS:
        found, *_ = phases(warm_up.warm_up("digits", form, 20))
        beside = consistency if form == warm_up.FOLLOW else 0
        assert found == pytest.approx(
            [info_nce(z1, z2, 1.0).item() + beside, whole.loss.item()], rel=1e-5
        )
    for part, options in {
        warm_up.CONSISTENCY: {"weighting": "uniform", "exclude_same_cluster": False},
        warm_up.EXCLUSION: {"weighting": "uniform"},
        warm_up.WEIGHTS: {"exclude_same_cluster": False},
    }.items():
        found, *_ = phases(warm_up.warm_up("digits", warm_up.RANDOM, 20, part=part))
        assert found[1] == pytest.approx(oracle.pgcl([z1, z2], [c], **options).loss.item(), 1e-5)


def test_a_placebo_permutes_the_clusters_of_the_contrast_alone():
    """The permutation is of graphs, so both views of one keep the clusters of another."""
    config = warm_up.warm_up("digits", warm_up.RANDOM, 20) | {"seed": 3}
    torch.manual_seed(1)
    z1, z2 = torch.randn(2, 40, warm_up.DIM)
    seen = {}
    for part in (None, warm_up.PLACEBO):
        torch.manual_seed(3)
        _, pgcl = warm_up.losses_of(config | ({"part": part} if part else {}))
        for name in ("contrast", "consistency"):
            getattr(pgcl, name).register_forward_pre_hook(
                lambda _, given, key=(part, name): seen.update({key: given[0]})
            )
        pgcl(z1, z2)
    real, permuted = (seen[part, "contrast"].clusters for part in (None, warm_up.PLACEBO))
    pairs, after = ([*zip(c[:40].tolist(), c[40:].tolist())] for c in (real, permuted))  # noqa: B905
    assert sorted(pairs) == sorted(after)
    assert sum(a == b for a, b in zip(pairs, after, strict=True)) < 10
    torch.testing.assert_close(seen[warm_up.PLACEBO, "consistency"].clusters, real)


def test_rows_with_a_warm_up_see_the_same_batches_and_views(monkeypatch):
    """Where nothing is learned, all rows see the same embeddings in every step."""
    monkeypatch.setitem(warm_up.SETTING, "lr", 0.0)
    monkeypatch.setitem(warm_up.SETTING, "batch_size", 50)
    few = {"digits": warm_up.SETS["digits"]._replace(epochs=2)}
    monkeypatch.setattr(warm_up, "SETS", few)
    seen, model_of = [], warm_up.ContrastiveModel

    def watched(*given):
        model = model_of(*given)
        model.encoder.register_forward_hook(
            lambda module, _, z: seen[-1].append(z.detach()) if module.training else None
        )
        return model

    monkeypatch.setattr(warm_up, "ContrastiveModel", watched)
    configs = [*warm_up.candidates("digits"), *warm_up.schedules("digits")]
    configs += warm_up.parts("digits", warm_up.FOLLOW, 20)
    for config in configs:
        seen.append([])
        warm_up.run(config | {"seed": 710}, None)
    views = [torch.cat(of_run) for of_run in seen]
    assert len(views[0]) == 2 * 2 * len(DIGITS)
    assert not torch.equal(views[0][:50], views[0][50:100])  # the two views of a batch
    assert all(torch.equal(of_run, views[0]) for of_run in views[1:])


def test_views_drop_nodes_and_perturb_edges():
    config = graphs.SETTING | {"row": graphs.INFO_NCE, "drop": 0.5, "perturb": 0.5}
    model = graphs.build(config, graphs.GIN(3), batches=2)
    batch = Batch.from_data_list(DIGITS)
    edges = {tuple(edge) for edge in batch.edge_index.T.tolist()}
    dropped, perturbed = model.augment1(batch), model.augment2(batch)
    assert dropped.num_nodes == pytest.approx(batch.num_nodes / 2, rel=0.05)
    assert perturbed.num_nodes == batch.num_nodes
    kept = edges & {tuple(edge) for edge in perturbed.edge_index.T.tolist()}
    assert 0.45 < len(kept) / len(edges) < 0.6  # some of the new edges are old ones


def test_the_optimizer_has_encoder_head_and_prototypes(monkeypatch, optimized, tmp_path):
    def all_of(*modules):
        return {id(p) for module in modules for p in module.parameters()}

    config = graphs.SETTING | {"row": graphs.PGCL, "epochs": 1, "seed": 0}
    model = graphs.trained(config, DIGITS)
    assert all_of(model.encoder, model.loss) == optimized[-1]
    of_pgcl = false_negatives.config_of("digits", graphs.PGCL, 0.5, "half") | config
    model = false_negatives.trained(of_pgcl, DIGITS, torch.empty(len(DIGITS), 0))
    assert all_of(model.encoder, model.loss) == optimized[-1]

    made = {}
    for module, name in (
        (warm_up, "losses_of"),
        (warm_up, "Projected"),
        (grace, "pgcl_of"),
        (grace, "GCN"),
    ):
        original = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *given, name=name, original=original, **options: made.setdefault(
                name, original(*given, **options)
            ),
        )
    monkeypatch.setattr(
        warm_up, "SETS", {"digits": few_labels.Set(2, standardise=False, perturb=0.1)}
    )
    for form in warm_up.FORMS:
        made.clear()
        before = len(optimized)
        warm_up.run(warm_up.warm_up("digits", form, 20) | {"seed": 0}, None)
        assert all_of(made["Projected"], *made["losses_of"]) == optimized[before]

    write_photo(tmp_path / "Photo", 300, 3)
    loss = "PGCL, lambda 1, K=50"
    of_grace = {"dataset": "Photo", "loss": loss, "seed": 0, "epochs": [1]}
    of_grace |= grace.SETTINGS["Photo"] | grace.LOSSES[loss] | {"batch": 200}
    grace.run(of_grace, tmp_path / "Photo")
    assert all_of(made["GCN"], made["pgcl_of"]) < optimized[-1]  # the head has four more
    assert len(optimized[-1]) == len(all_of(made["GCN"], made["pgcl_of"])) + 4


def test_a_row_of_nodes_trains_its_own_loss_at_its_temperature(monkeypatch, tmp_path):
    """The first step of GRACE's loop, whose views differ."""
    write_photo(tmp_path / "Photo", 300, 3)
    seen = []
    for name in ("InfoNCE", "pgcl_of"):
        original = getattr(grace, name)

        def watched(*given, original=original, **options):
            loss = original(*given, **options)
            weight = loss.prototypes.weight.clone() if isinstance(loss, PGCLLoss) else None
            loss.register_forward_hook(
                lambda _, views, value: seen.append([weight, *(z.detach() for z in views), value])
            )
            return loss

        monkeypatch.setattr(grace, name, watched)
    of_grace = grace.SETTINGS["Photo"] | {"batch": 60, "temperature": TAU}
    for loss, options in grace.LOSSES.items():
        given = {"dataset": "Photo", "loss": loss, "seed": 0, "epochs": [1]}
        grace.run(given | of_grace | options, tmp_path / "Photo")
        weight, z1, z2, value = seen[-1]
        assert not torch.equal(z1, z2)
        tau = options.get("temperature", TAU)
        if loss == grace.INFO_NCE:
            of_oracle = info_nce(z1, z2, tau)
        else:
            mode = {"consistency_weight": options["consistency_weight"], "temperature": tau}
            mode["balance_predictions"] = "balanced" in loss
            of_oracle = oracle.pgcl([z1, z2], [weight], **mode).loss
        assert value.item() == pytest.approx(of_oracle.item(), rel=1e-4)


def test_half_of_the_graphs_trains_and_an_oracle_leaves_out_its_classes(monkeypatch):
    seen, trained = [], false_negatives.trained

    def watched(config, training, groups):
        seen.append(training)
        return trained(config | {"epochs": 1}, training, groups)

    monkeypatch.setattr(false_negatives, "trained", watched)
    config = false_negatives.config_of("digits", graphs.INFO_NCE, 0.5, "half") | {"seed": 0}
    false_negatives.run(config, None)
    development, held_out = false_negatives.halves(LABELS)
    assert sorted(graph.number for graph in seen[0]) == sorted(development)
    assert not {*development} & {*held_out}
    assert len(development) == len(held_out) == len(DIGITS) / 2

    torch.manual_seed(0)
    batch = Batch.from_data_list(DIGITS[:20])
    z1, z2 = torch.randn(2, 20, 6)
    oracle_config = config | {"row": false_negatives.ORACLE, "temperature": TAU}
    loss, given = false_negatives.loss_of(oracle_config, torch.from_numpy(LABELS).unsqueeze(1))
    z, y = oracle.unit(torch.cat([z1, z2])), LABELS[:20].tolist() * 2
    losses = []
    for i in range(40):
        positive = torch.exp(z[i] @ z[(i + 20) % 40] / TAU)
        others = [torch.exp(z[i] @ z[j] / TAU) for j in range(40) if y[j] != y[i]]
        losses.append(torch.log((positive + sum(others)) / positive))
    value = loss(z1, z2, **given(batch)).item()
    assert value == pytest.approx((sum(losses) / 40).item(), rel=1e-5)
