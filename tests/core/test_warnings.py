"""Silent failures are reported by one warning each; healthy training gives none."""

import copy
import pickle
import warnings

import pytest
import torch

from pgcl_losses import PGCLLoss
from pgcl_losses._warnings import _PATIENCE

DIM = 6
STEPS = 100  # enough for each warning


def train(pgcl, optimizer=None, steps=STEPS, num_graphs=12, loss_of=None, accumulate=1):
    """The warnings of a training, whose embeddings ``z`` [2, N, D] are parameters."""
    z = torch.nn.Parameter(torch.randn(2, num_graphs, DIM))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            (loss_of(z, step) if loss_of else pgcl(*z)).backward()
            if optimizer is not None and (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def optimizer_of(pgcl):
    return torch.optim.Adam(pgcl.parameters(), lr=1e-3)


@pytest.mark.parametrize("num_prototypes", [2, 4])
def test_prototypes_without_an_optimizer(num_prototypes):
    (message,) = train(PGCLLoss(DIM, num_prototypes))
    assert message.startswith("PGCLLoss: the prototypes have not moved in 16 training forwards: ")
    assert "*pgcl.parameters()" in message


def test_an_optimizer_that_changes_data_does_not_warn():
    pgcl = PGCLLoss(DIM, 4)

    class Fused:
        def step(self):
            pgcl.prototypes.weight.data.sub_(1e-3)

        def zero_grad(self):
            pgcl.zero_grad()

    assert train(pgcl, Fused()) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"freeze_steps": 1000},
        {"queue_size": 8},
        {"engine": "streaming"},
        {"weighting": "sample", "exclude_same_cluster": False},
    ],
    ids=str,
)
def test_healthy_training_does_not_warn(options):
    pgcl = PGCLLoss(DIM, 4, **options)
    assert train(pgcl, optimizer_of(pgcl)) == []
    pgcl = PGCLLoss(DIM, 4, **options)
    assert train(pgcl, optimizer_of(pgcl), accumulate=_PATIENCE) == []


def test_prototypes_that_cannot_learn_do_not_warn():
    assert train(PGCLLoss(DIM, 4, consistency_weight=0)) == []
    fixed = PGCLLoss(DIM, 4)
    fixed.prototypes.weight.requires_grad_(False)
    assert train(fixed) == []


def test_forwards_that_do_not_train_do_not_warn():
    pgcl = PGCLLoss(DIM, 4)
    z = torch.randn(2, 12, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STEPS):
            with torch.no_grad():
                pgcl(*z)
        pgcl.eval()
        for _ in range(STEPS):
            pgcl(*z.requires_grad_())


class TestAnEncoderWithoutGradient:
    def test_warns_once(self):
        pgcl = PGCLLoss(DIM, 4)
        messages = train(pgcl, optimizer_of(pgcl), loss_of=lambda z, _: pgcl(*z.detach()))
        assert len(messages) == 1  # in six times as many steps
        assert messages[0].startswith(
            "PGCLLoss: the embeddings had no gradient in 16 training forwards, so"
        )
        assert "torch.no_grad()" in messages[0]

    def test_warns_if_prototypes_are_frozen_too(self):
        """The prototypes then have a gradient of zeros."""
        pgcl = PGCLLoss(DIM, 4, freeze_steps=1000)
        messages = train(pgcl, optimizer_of(pgcl), loss_of=lambda z, _: pgcl(*z.detach()))
        assert len(messages) == 1

    def test_warns_if_the_temperature_alone_learns(self):
        temperature = torch.nn.Parameter(torch.tensor(0.2))
        pgcl = PGCLLoss(DIM, 4, consistency_weight=0, temperature=temperature)
        messages = train(pgcl, optimizer_of(pgcl), loss_of=lambda z, _: pgcl(*z.detach()))
        assert len(messages) == 1

    def test_steps_with_a_gradient_between_them_do_not_warn(self):
        pgcl = PGCLLoss(DIM, 4)

        def loss_of(z, step):
            return pgcl(*(z if step % _PATIENCE == 0 else z.detach()))

        assert train(pgcl, optimizer_of(pgcl), steps=4 * _PATIENCE, loss_of=loss_of) == []

    def test_one_view_with_gradient_does_not_warn(self):
        pgcl = PGCLLoss(DIM, 4)
        messages = train(pgcl, optimizer_of(pgcl), loss_of=lambda z, _: pgcl(z[0], z[1].detach()))
        assert messages == []

    def test_a_filter_of_its_message_silences_it(self):
        pgcl, z = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "PGCLLoss: the embeddings had no gradient")
            for _ in range(_PATIENCE):
                pgcl(*z)

    def test_a_loss_without_parameters_that_learn_does_not_warn(self):
        pgcl, z = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        pgcl.requires_grad_(False)
        for _ in range(_PATIENCE):  # a warning would be an error
            pgcl(*z)

    def test_a_compiled_loss_stays_one_graph(self):
        pgcl, z = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        compiled = torch.compile(pgcl, backend="eager", fullgraph=True)
        for _ in range(_PATIENCE):
            compiled(*z)


def test_batches_smaller_than_the_number_of_prototypes():
    pgcl = PGCLLoss(DIM, 16)
    (message,) = train(pgcl, optimizer_of(pgcl))
    assert message.startswith(
        "PGCLLoss: 12 graphs of a batch and 0 of the queue are balanced over 16 "
    )
    pgcl = PGCLLoss(DIM, 16, queue_size=4)
    assert train(pgcl, optimizer_of(pgcl)) == []


def test_a_batch_of_one_graph_with_a_queue_does_not_warn():
    pgcl = PGCLLoss(DIM, 4, queue_size=64)
    assert train(pgcl, optimizer_of(pgcl), num_graphs=1) == []


def test_options_without_clusters_do_not_warn_of_clusters():
    """InfoNCE by options, with few graphs and collapsed embeddings."""
    pgcl = PGCLLoss(
        DIM, 16, weighting="uniform", exclude_same_cluster=False, consistency_weight=0.0
    )
    assert train(pgcl, optimizer_of(pgcl), loss_of=lambda z, _: pgcl(*(1 + 1e-7 * z))) == []


def test_a_consistency_that_is_switched_on_later():
    pgcl = PGCLLoss(DIM, 4, consistency_weight=0.0)

    def loss_of(z, step):
        pgcl.consistency_weight = float(step > 10)
        return pgcl(*z)

    assert len(train(pgcl, loss_of=loss_of)) == 1


def test_prototypes_that_are_normalised_in_each_step():
    def loss_of(z, step):
        pgcl.prototypes.normalize_()
        return pgcl(*z)

    pgcl = PGCLLoss(DIM, 4)
    assert len(train(pgcl, loss_of=loss_of)) == 1
    pgcl = PGCLLoss(DIM, 4)
    assert train(pgcl, optimizer_of(pgcl), loss_of=loss_of) == []


def test_meta_tensors_do_not_warn():
    pgcl = PGCLLoss(DIM, 4).to("meta")
    z = torch.empty(2, 12, DIM, device="meta", requires_grad=True)
    for _ in range(STEPS):
        pgcl(*z)


def test_a_warning_points_to_the_users_line():
    pgcl = PGCLLoss(DIM, 16)
    z = torch.randn(2, 12, DIM, requires_grad=True)
    pgcl(*z)
    pgcl(*z)
    with pytest.warns(UserWarning, match="are balanced over 16") as caught:
        pgcl(*z)
    assert caught[0].filename == __file__


def test_a_small_last_batch_does_not_warn():
    pgcl = PGCLLoss(DIM, 10)

    def loss_of(z, step):
        return pgcl(*(z if step % 2 else z[:, :3]))

    assert train(pgcl, optimizer_of(pgcl), loss_of=loss_of) == []


def test_one_cluster_with_nearly_all_graphs():
    pgcl = PGCLLoss(DIM, 4, epsilon=10.0)

    def collapsed(z, step):
        direction = torch.linspace(1, 2, DIM).expand_as(z)
        return pgcl(*(direction + 1e-7 * z))

    messages = train(pgcl, optimizer_of(pgcl), loss_of=collapsed)
    assert len(messages) == 1
    assert messages[0].startswith("PGCLLoss: one cluster has 100% of the embeddings, so hardly any")
    heads = PGCLLoss(DIM, (4, 3), epsilon=10.0)
    assert len(train(heads, optimizer_of(heads), loss_of=lambda z, _: heads(*(1 + 1e-7 * z)))) == 1


def test_one_cluster_with_nearly_all_graphs_in_one_head_does_not_warn():
    for heads in ((1, 4), (4, 1)):
        pgcl = PGCLLoss(DIM, heads)
        assert train(pgcl, optimizer_of(pgcl), num_graphs=40) == []


@pytest.mark.parametrize("options", [{"soft_clusters": True}, {"warmup_steps": 95}], ids=str)
def test_one_cluster_that_is_not_excluded_does_not_warn(options):
    pgcl = PGCLLoss(DIM, 4, epsilon=10.0, **options)
    messages = train(pgcl, optimizer_of(pgcl), loss_of=lambda z, _: pgcl(*(1 + 1e-7 * z)))
    assert not any("one cluster has" in message for message in messages)
    single = PGCLLoss(DIM, 1)
    assert train(single, optimizer_of(single)) == []


class TestCollapsedEmbeddings:
    """Embeddings hardly differ, and no prototype is near them."""

    def train(self, initialise=False, spread=0.05, num_prototypes=(3, 4), **options):
        torch.manual_seed(0)
        pgcl = PGCLLoss(DIM, num_prototypes, epsilon=0.01, **options)
        direction = torch.linspace(1, 2, DIM)

        def loss_of(z, step):
            both = direction + spread * z[:1].expand_as(z)  # views that agree
            if initialise and step == 0:
                pgcl.prototypes.start_from_(both.flatten(0, 1))
            return pgcl(*both)

        optimizer = torch.optim.SGD(pgcl.parameters(), lr=1e-5)
        return train(pgcl, optimizer, loss_of=loss_of, num_graphs=40)

    def test_warns_once(self):
        (message,) = self.train()
        assert message.startswith(
            "PGCLLoss: the embeddings are collapsed: their mean cosine is 1.00"
        )
        assert "pgcl.prototypes.start_from_(embeddings)" in message

    def test_embeddings_that_differ_do_not_warn(self):
        assert self.train(spread=1.0) == []

    def test_prototypes_near_the_embeddings_do_not_warn(self):
        options = {"spread": 0.3, "temperature": 0.02}
        assert self.train(initialise=True, **options) == []
        assert len(self.train(**options)) == 1

    def test_the_warm_up_does_not_warn(self):
        assert self.train(warmup_steps=90) == []

    def test_without_consistency_it_does_not_warn(self):
        assert self.train(consistency_weight=0.0) == []


def test_a_filter_silences_all_warnings():
    pgcl = PGCLLoss(DIM, 16)
    z = torch.randn(2, 12, DIM, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "PGCLLoss")
        for _ in range(STEPS):
            pgcl(*z)


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 pickles
def test_copies_warn_again_and_checkpoints_hold_no_counts():
    pgcl = PGCLLoss(DIM, 4)
    keys = set(pgcl.state_dict())
    assert len(train(pgcl)) == 1
    assert train(pgcl) == []
    assert set(pgcl.state_dict()) == keys
    for fresh in (copy.deepcopy(pgcl), pickle.loads(pickle.dumps(pgcl))):
        assert len(train(fresh)) == 1
