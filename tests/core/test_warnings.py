"""Silent failures are reported by one warning each; healthy training gives none."""

import copy
import pickle
import warnings

import pytest
import torch

from pgcl_losses import PGCLLoss
from pgcl_losses.watch import _PATIENCE

DIM = 6
STEPS = 100  # enough for each warning
FIXED = torch.linspace(1, 2, DIM)  # a direction


def messages_of(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


def train(pgcl, optimizer=None, steps=STEPS, num_graphs=12, loss_of=None, accumulate=1):
    """The warnings of a training, whose embeddings ``z`` [2, N, D] are parameters."""
    z = torch.nn.Parameter(torch.randn(2, num_graphs, DIM))

    def training():
        for step in range(steps):
            (loss_of(z, step) if loss_of else pgcl(*z)).backward()
            if optimizer is not None and (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()

    return messages_of(training)


def optimizer_of(pgcl):
    return torch.optim.Adam(pgcl.parameters(), lr=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"freeze_steps": 1000},
        {"queue_size": 8},
        {"engine": "dense"},
        {"weighting": "sample", "exclude_same_cluster": False},
    ],
    ids=str,
)
def test_healthy_training_does_not_warn(options):
    for accumulate in (1, _PATIENCE):
        pgcl = PGCLLoss(DIM, 4, **options)
        assert train(pgcl, optimizer_of(pgcl), accumulate=accumulate) == []


class TestPrototypesThatNoOptimizerMoves:
    @pytest.mark.parametrize("num_prototypes", [2, 4])
    def test_warns(self, num_prototypes):
        (message,) = train(PGCLLoss(DIM, num_prototypes))
        assert message.startswith(
            "PGCLLoss: the prototypes have not moved in 16 training forwards: "
        )
        assert "*pgcl.parameters()" in message

    def test_an_optimizer_that_changes_data_does_not_warn(self):
        pgcl = PGCLLoss(DIM, 4)

        class Fused:
            def step(self):
                pgcl.prototypes.weight.data.sub_(1e-3)

            def zero_grad(self):
                pgcl.zero_grad()

        assert train(pgcl, Fused()) == []

    def test_prototypes_that_cannot_learn_do_not_warn(self):
        assert train(PGCLLoss(DIM, 4, consistency_weight=0)) == []
        fixed = PGCLLoss(DIM, 4)
        fixed.prototypes.weight.requires_grad_(False)
        assert train(fixed) == []

    def test_a_consistency_that_is_switched_on_later(self):
        pgcl = PGCLLoss(DIM, 4, consistency_weight=0.0)

        def loss_of(z, step):
            pgcl.consistency_weight = float(step > 10)
            return pgcl(*z)

        assert len(train(pgcl, loss_of=loss_of)) == 1

    @pytest.mark.parametrize("optimized", [False, True])
    def test_prototypes_that_are_normalised_in_each_step(self, optimized):
        def loss_of(z, step):
            weight = pgcl.prototypes.weight.data
            weight /= weight.norm(dim=1, keepdim=True)
            return pgcl(*z)

        pgcl = PGCLLoss(DIM, 4)
        optimizer = optimizer_of(pgcl) if optimized else None
        assert len(train(pgcl, optimizer, loss_of=loss_of)) == (not optimized)


class TestForwardsThatDoNotTrain:
    def test_validation_does_not_warn(self):
        pgcl = PGCLLoss(DIM, 4, memory_size=3)
        z = torch.randn(2, 12, DIM)

        def epochs():
            for _ in range(3):
                pgcl.eval()
                with torch.no_grad():
                    pgcl(*z)
                pgcl(*z.requires_grad_()).backward()
                pgcl.train()(*z).backward()

        assert messages_of(epochs) == []

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"queue_size": 2, "memory_size": 3}, "does not update the memory and the queue:"),
            ({}, None),
        ],
    )
    def test_training_in_eval_mode(self, options, text):
        messages = train(PGCLLoss(DIM, 4, **options).eval())
        assert len(messages) == (text is not None)
        assert all(text in message for message in messages)

    def test_meta_tensors_do_not_warn(self):
        pgcl = PGCLLoss(DIM, 4).to("meta")
        z = torch.empty(2, 12, DIM, device="meta", requires_grad=True)
        for _ in range(STEPS):  # a warning would be an error
            pgcl(*z)


class TestAnEncoderWithoutGradient:
    def train(self, loss_of=lambda pgcl, z, _: pgcl(*z.detach()), steps=STEPS, **options):
        pgcl = PGCLLoss(DIM, 4, **options)
        given = {"loss_of": lambda z, step: loss_of(pgcl, z, step), "steps": steps}
        return train(pgcl, optimizer_of(pgcl), **given)

    def test_warns_once(self):
        (message,) = self.train()  # in six times as many steps
        text = "PGCLLoss: the embeddings had no gradient in 16 training forwards, so"
        assert message.startswith(text)
        assert "torch.no_grad()" in message

    def test_warns_if_prototypes_are_frozen_or_the_temperature_alone_learns(self):
        # Frozen prototypes have a gradient of zeros.
        assert len(self.train(freeze_steps=1000)) == 1
        temperature = torch.nn.Parameter(torch.tensor(0.2))
        assert len(self.train(consistency_weight=0, temperature=temperature)) == 1

    def test_a_gradient_of_some_embeddings_does_not_warn(self):
        of_one_view = self.train(lambda pgcl, z, _: pgcl(z[0], z[1].detach()))
        assert of_one_view == []

        def sometimes(pgcl, z, step):
            return pgcl(*(z if step % _PATIENCE == 0 else z.detach()))

        assert self.train(sometimes, steps=4 * _PATIENCE) == []

    def test_a_loss_without_parameters_that_learn_does_not_warn(self):
        pgcl, z = PGCLLoss(DIM, 4).requires_grad_(False), torch.randn(2, 12, DIM)
        for _ in range(_PATIENCE):  # a warning would be an error
            pgcl(*z)

    def test_a_compiled_loss_stays_one_graph(self):
        pgcl, z = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        compiled = torch.compile(pgcl, backend="eager", fullgraph=True)
        for _ in range(_PATIENCE):
            compiled(*z)


class TestSmallBatches:
    def test_a_queue_that_makes_up_for_them_does_not_warn(self):
        for num_prototypes, queue_size, num_graphs in ((16, 4, 12), (4, 64, 2)):
            pgcl = PGCLLoss(DIM, num_prototypes, queue_size=queue_size)
            assert train(pgcl, optimizer_of(pgcl), num_graphs=num_graphs) == []

    def test_a_small_last_batch_does_not_warn(self):
        pgcl = PGCLLoss(DIM, 10)

        def loss_of(z, step):
            return pgcl(*(z if step % 2 else z[:, :3]))

        assert train(pgcl, optimizer_of(pgcl), loss_of=loss_of) == []

    def test_the_warning_points_to_the_users_line(self):
        pgcl = PGCLLoss(DIM, 16)
        z = torch.randn(2, 12, DIM, requires_grad=True)
        pgcl(*z)
        pgcl(*z)
        with pytest.warns(UserWarning, match="are balanced over 16") as caught:
            pgcl(*z)
        assert caught[0].filename == __file__


class TestOneClusterWithNearlyAllGraphs:
    def train(self, num_prototypes=4, **options):
        pgcl = PGCLLoss(DIM, num_prototypes, epsilon=10.0, **options)
        loss_of = lambda z, _: pgcl(*(FIXED + 1e-7 * z))  # noqa: E731
        return train(pgcl, optimizer_of(pgcl), loss_of=loss_of)

    @pytest.mark.parametrize("num_prototypes", [4, (4, 3)])
    def test_warns_once(self, num_prototypes):
        (message,) = self.train(num_prototypes)
        text = "PGCLLoss: one cluster has 100% of the embeddings, so hardly any"
        assert message.startswith(text)

    def test_in_one_of_two_heads_it_does_not_warn(self):
        for heads in ((1, 4), (4, 1)):
            pgcl = PGCLLoss(DIM, heads)
            assert train(pgcl, optimizer_of(pgcl), num_graphs=40) == []

    def test_a_cluster_that_is_not_excluded_does_not_warn(self):
        assert not any("one cluster has" in text for text in self.train(soft_clusters=True))
        info_nce = {"weighting": "uniform", "exclude_same_cluster": False}
        assert self.train(16, **info_nce, consistency_weight=0.0) == []


class TestCollapsedEmbeddings:
    """Embeddings hardly differ, and no prototype is near them."""

    def train(self, initialise=False, spread=0.05, num_prototypes=(3, 4), **options):
        torch.manual_seed(0)
        pgcl = PGCLLoss(DIM, num_prototypes, epsilon=0.01, **options)

        def loss_of(z, step):
            both = FIXED + spread * z[:1].expand_as(z)  # views that agree
            if initialise and step == 0:
                pgcl.prototypes.start_from_(both.flatten(0, 1))
            return pgcl(*both)

        optimizer = torch.optim.SGD(pgcl.parameters(), lr=1e-5)
        return train(pgcl, optimizer, loss_of=loss_of, num_graphs=40)

    def test_warns_once(self):
        (message,) = self.train()
        text = "PGCLLoss: the embeddings are collapsed: their mean cosine is 1.00"
        assert message.startswith(text)
        assert "pgcl.prototypes.start_from_(embeddings)" in message

    def test_embeddings_that_differ_or_without_consistency_do_not_warn(self):
        assert self.train(spread=1.0) == []
        assert self.train(consistency_weight=0.0) == []

    def test_prototypes_near_the_embeddings_do_not_warn(self):
        options = {"spread": 0.3, "temperature": 0.02}
        assert self.train(initialise=True, **options) == []
        assert len(self.train(**options)) == 1


@pytest.mark.parametrize(
    ("text", "num_prototypes", "learns"),
    [("PGCLLoss", 16, True), ("PGCLLoss: the embeddings had no gradient", 4, False)],
)
def test_a_filter_silences_warnings(text, num_prototypes, learns):
    pgcl, z = PGCLLoss(DIM, num_prototypes), torch.randn(2, 12, DIM, requires_grad=learns)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", text)
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
