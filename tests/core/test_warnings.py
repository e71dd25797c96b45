"""Warnings: each is said once, when it is so, and not when it is not."""

import copy
import pickle
import warnings

import pytest
import torch

from pgcl_losses import PGCLLoss
from pgcl_losses._warnings import _PATIENCE

DIM = 6
STEPS = 100  # enough for each warning


def train(pgcl, optimizer=None, steps=STEPS, num_rows=12, rows_of=None, accumulate=1):
    """What was warned of."""
    rows = torch.nn.Parameter(torch.randn(2, num_rows, DIM))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            (rows_of(rows, step) if rows_of else pgcl(*rows)).backward()
            if optimizer is not None and (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def moving(pgcl):
    return torch.optim.Adam(pgcl.parameters(), lr=1e-3)


@pytest.mark.parametrize("num_prototypes", [2, 4])
def test_prototypes_that_no_optimizer_has(num_prototypes):
    (said,) = train(PGCLLoss(DIM, num_prototypes))
    assert said.startswith("PGCLLoss: the prototypes have not moved in 16 training forwards: ")
    assert "*pgcl.parameters()" in said


def test_an_optimizer_that_writes_around_autograd():
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
def test_a_healthy_training_warns_of_nothing(options):
    pgcl = PGCLLoss(DIM, 4, **options)
    assert train(pgcl, moving(pgcl)) == []
    pgcl = PGCLLoss(DIM, 4, **options)
    assert train(pgcl, moving(pgcl), accumulate=_PATIENCE) == []


def test_prototypes_that_are_not_to_move():
    assert train(PGCLLoss(DIM, 4, consistency_weight=0)) == []
    fixed = PGCLLoss(DIM, 4)
    fixed.prototypes.weight.requires_grad_(False)
    assert train(fixed) == []


def test_steps_that_do_not_train():
    pgcl = PGCLLoss(DIM, 4)
    rows = torch.randn(2, 12, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(STEPS):
            with torch.no_grad():
                pgcl(*rows)
        pgcl.eval()
        for _ in range(STEPS):
            pgcl(*rows.requires_grad_())


class TestAnEncoderWithoutGradient:
    def test_is_said(self):
        pgcl = PGCLLoss(DIM, 4)
        said = train(pgcl, moving(pgcl), rows_of=lambda rows, _: pgcl(*rows.detach()))
        assert len(said) == 1  # also in twice as many steps
        assert said[0].startswith(
            "PGCLLoss: the embeddings had no gradient in 16 training forwards, so"
        )
        assert "torch.no_grad()" in said[0]

    def test_warns_where_prototypes_are_frozen(self):
        """The loss has a gradient, which is 0."""
        pgcl = PGCLLoss(DIM, 4, freeze_steps=1000)
        said = train(pgcl, moving(pgcl), rows_of=lambda rows, _: pgcl(*rows.detach()))
        assert len(said) == 1

    def test_is_said_of_steps_in_a_row_alone(self):
        pgcl = PGCLLoss(DIM, 4)

        def rows_of(rows, step):
            return pgcl(*(rows if step % _PATIENCE == 0 else rows.detach()))

        assert train(pgcl, moving(pgcl), steps=4 * _PATIENCE, rows_of=rows_of) == []

    def test_not_where_one_view_learns(self):
        pgcl = PGCLLoss(DIM, 4)
        momentum = train(
            pgcl, moving(pgcl), rows_of=lambda rows, _: pgcl(rows[0], rows[1].detach())
        )
        assert momentum == []

    def test_its_own_words_silence_it(self):
        pgcl, rows = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "PGCLLoss: the embeddings had no gradient")
            for _ in range(_PATIENCE):
                pgcl(*rows)

    def test_not_where_the_loss_is_but_looked_at(self):
        pgcl, rows = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        pgcl.requires_grad_(False)
        for _ in range(_PATIENCE):  # a warning would be an error
            pgcl(*rows)

    def test_a_compiled_loss_stays_one_graph(self):
        pgcl, rows = PGCLLoss(DIM, 4), torch.randn(2, 12, DIM)
        compiled = torch.compile(pgcl, backend="eager", fullgraph=True)
        for _ in range(_PATIENCE):
            compiled(*rows)


def test_batches_smaller_than_the_number_of_prototypes():
    pgcl = PGCLLoss(DIM, 16)
    (said,) = train(pgcl, moving(pgcl))
    assert said.startswith(
        "PGCLLoss: 12 graphs of a batch and 0 of the queue are balanced over 16 "
    )
    pgcl = PGCLLoss(DIM, 16, queue_size=4)
    assert train(pgcl, moving(pgcl)) == []


def test_rows_of_a_queue_are_no_cluster_of_the_batch():
    pgcl = PGCLLoss(DIM, 4, queue_size=64)
    assert train(pgcl, moving(pgcl), num_rows=1) == []


def test_what_clusters_have_no_say_in():
    """InfoNCE as a configuration, on rows that are too few and all alike."""
    pgcl = PGCLLoss(
        DIM, 16, weighting="uniform", exclude_same_cluster=False, consistency_weight=0.0
    )
    assert train(pgcl, moving(pgcl), rows_of=lambda rows, _: pgcl(*(1 + 1e-7 * rows))) == []


def test_a_consistency_that_begins_late():
    pgcl = PGCLLoss(DIM, 4, consistency_weight=0.0)

    def rows_of(rows, step):
        pgcl.consistency_weight = float(step > 10)
        return pgcl(*rows)

    assert len(train(pgcl, rows_of=rows_of)) == 1


def test_prototypes_that_are_normalised_all_the_time():
    def rows_of(rows, step):
        pgcl.prototypes.normalize_()
        return pgcl(*rows)

    pgcl = PGCLLoss(DIM, 4)
    assert len(train(pgcl, rows_of=rows_of)) == 1
    pgcl = PGCLLoss(DIM, 4)
    assert train(pgcl, moving(pgcl), rows_of=rows_of) == []


def test_tensors_without_numbers():
    pgcl = PGCLLoss(DIM, 4).to("meta")
    rows = torch.empty(2, 12, DIM, device="meta", requires_grad=True)
    for _ in range(STEPS):
        pgcl(*rows)


def test_a_warning_points_to_the_users_line():
    pgcl = PGCLLoss(DIM, 16)
    rows = torch.randn(2, 12, DIM, requires_grad=True)
    pgcl(*rows)
    pgcl(*rows)
    with pytest.warns(UserWarning, match="are balanced over 16") as caught:
        pgcl(*rows)
    assert caught[0].filename == __file__


def test_a_small_last_batch_is_no_reason():
    pgcl = PGCLLoss(DIM, 10)

    def rows_of(rows, step):
        return pgcl(*(rows if step % 2 else rows[:, :3]))

    assert train(pgcl, moving(pgcl), rows_of=rows_of) == []


def test_one_cluster_that_has_nearly_all_rows():
    pgcl = PGCLLoss(DIM, 4, epsilon=10.0)

    def collapsed(rows, step):
        direction = torch.linspace(1, 2, DIM).expand_as(rows)
        return pgcl(*(direction + 1e-7 * rows))

    said = train(pgcl, moving(pgcl), rows_of=collapsed)
    assert len(said) == 1
    assert said[0].startswith("PGCLLoss: one cluster has 100% of the embeddings, so hardly any")
    heads = PGCLLoss(DIM, (4, 3), epsilon=10.0)
    assert len(train(heads, moving(heads), rows_of=lambda rows, _: heads(*(1 + 1e-7 * rows)))) == 1


def test_one_cluster_that_has_nearly_all_rows_in_one_head_alone():
    for heads in ((1, 4), (4, 1)):
        pgcl = PGCLLoss(DIM, heads)
        assert train(pgcl, moving(pgcl), num_rows=40) == []


@pytest.mark.parametrize("options", [{"soft_clusters": True}, {"warmup_steps": 95}], ids=str)
def test_one_cluster_that_is_not_left_out(options):
    pgcl = PGCLLoss(DIM, 4, epsilon=10.0, **options)
    collapsed = train(pgcl, moving(pgcl), rows_of=lambda rows, _: pgcl(*(1 + 1e-7 * rows)))
    assert not any("one cluster has" in said for said in collapsed)
    single = PGCLLoss(DIM, 1)
    assert train(single, moving(single)) == []


class TestOneDirection:
    """Rows that hardly differ, and prototypes that are near none of them."""

    def train(self, start=False, spread=0.05, num_prototypes=(3, 4), **options):
        torch.manual_seed(0)
        pgcl = PGCLLoss(DIM, num_prototypes, epsilon=0.01, **options)
        direction = torch.linspace(1, 2, DIM)

        def rows_of(rows, step):
            both = direction + spread * rows[:1].expand_as(rows)  # views that agree
            if start and step == 0:
                pgcl.prototypes.start_from_(both.flatten(0, 1))
            return pgcl(*both)

        optimizer = torch.optim.SGD(pgcl.parameters(), lr=1e-5)
        return train(pgcl, optimizer, rows_of=rows_of, num_rows=40)

    def test_is_said(self):
        (said,) = self.train()
        assert said.startswith("PGCLLoss: the embeddings are collapsed: their mean cosine is 1.00")
        assert "pgcl.prototypes.start_from_(embeddings)" in said

    def test_not_of_rows_that_differ(self):
        assert self.train(spread=1.0) == []

    def test_not_where_prototypes_lie_among_the_rows(self):
        options = {"spread": 0.3, "temperature": 0.02}
        assert self.train(start=True, **options) == []
        assert len(self.train(**options)) == 1

    def test_not_in_the_warm_up(self):
        assert self.train(warmup_steps=90) == []

    def test_not_without_consistency(self):
        assert self.train(consistency_weight=0.0) == []


def test_a_filter_silences_them():
    pgcl = PGCLLoss(DIM, 16)
    rows = torch.randn(2, 12, DIM, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "PGCLLoss")
        for _ in range(STEPS):
            pgcl(*rows)


@pytest.mark.filterwarnings("ignore:You are using `torch.load`:FutureWarning")  # torch 2.4 pickles
def test_copies_begin_anew_and_checkpoints_know_nothing_of_it():
    pgcl = PGCLLoss(DIM, 4)
    keys = set(pgcl.state_dict())
    assert len(train(pgcl)) == 1
    assert train(pgcl) == []
    assert set(pgcl.state_dict()) == keys
    for fresh in (copy.deepcopy(pgcl), pickle.loads(pickle.dumps(pgcl))):
        assert len(train(fresh)) == 1
