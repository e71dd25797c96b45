"""The row that begins with InfoNCE, after which prototypes are initialised from embeddings."""

import pytest
import torch
from helpers.scripts import main_here, threads_for_processes

from experiments.common import results
from experiments.transfer import pretrain as program
from experiments.transfer import rows
from experiments.transfer.model import MoleculeGIN, encoder_of
from pgcl_losses import SinkhornPrototypes

SMALL = (
    "--row=PGCL, recommended",
    "--limit=24",
    "--batch-size=12",
    "--workers=1",
)  # two steps an epoch


@pytest.fixture
def starts(monkeypatch):
    """The steps after which prototypes are initialised, and the numbers of embeddings."""
    made, steps = [], []
    start, is_initialisation = SinkhornPrototypes.start_from_, program.is_initialisation

    def spy(self, embeddings):
        made.append((steps[-1], len(embeddings)))
        return start(self, embeddings)

    def at(step, config):
        steps.append(step)
        return is_initialisation(step, config)

    monkeypatch.setattr(program, "is_initialisation", at)
    monkeypatch.setattr(SinkhornPrototypes, "start_from_", spy)
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("molecules")


@pytest.fixture
def pretrain(monkeypatch, cache, starts):
    """Runs the program here, with numbers for few molecules."""
    threads_for_processes(monkeypatch, results)
    monkeypatch.setattr(rows, "LOSS", {"num_prototypes": 4, "consistency_weight": 1.0})
    monkeypatch.setattr(rows, "START_BATCHES", 2)

    def call(output, *arguments):
        given = (*SMALL, f"--cache={cache}", f"--output={output}", *arguments)
        main_here(monkeypatch, program, *given)

    return call


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("lead", "fractions", "wanted"),
    [(0.5, (0.5,), [4]), (0.4, (0.0, 0.4), [0, 3])],  # of 8 steps; 3 is within an epoch
)
def test_a_resumed_run_initialises_its_prototypes_as_often_as_an_uninterrupted_one(
    monkeypatch, tmp_path, pretrain, starts, lead, fractions, wanted
):
    monkeypatch.setattr(rows, "LEAD", lead)
    monkeypatch.setattr(rows, "STARTS", fractions)
    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    pretrain(whole, "--epochs=4")
    assert starts == [(step, 2 * 2 * 12) for step in wanted]  # two views of two batches
    starts.clear()
    train_epoch = program.train_epoch
    for last in (2, 3):  # at the end of InfoNCE, and after it

        def killed(epoch, *given, last=last):
            if epoch == last:
                raise Killed
            return train_epoch(epoch, *given)

        monkeypatch.setattr(program, "train_epoch", killed)
        with pytest.raises(Killed):
            pretrain(stopped, "--epochs=4")
    monkeypatch.setattr(program, "train_epoch", train_epoch)
    pretrain(stopped, "--epochs=4")
    assert [step for step, _ in starts] == wanted
    first, second = (torch.load(path, weights_only=True) for path in (whole, stopped))
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    assert first["config"]["lead_steps"] == wanted[-1]
    # The fraction is of another number of steps.
    with pytest.raises(ValueError, match=r"is of another run, .*'lead_steps'.* choose another"):
        pretrain(stopped, "--epochs=6")


def test_its_numbers_are_in_the_file(monkeypatch, tmp_path, pretrain):
    """So that an encoder is read whatever the numbers have become since."""
    path = tmp_path / "recipe.pt"
    pretrain(path, "--epochs=1")
    state = torch.load(path, weights_only=True)
    assert state["config"]["loss"] == {"num_prototypes": 4, "consistency_weight": 1.0}
    monkeypatch.setattr(rows, "LOSS", {"num_prototypes": 7})
    assert isinstance(encoder_of(path), MoleculeGIN)
    with pytest.raises(ValueError, match=r"is of another run, .*: choose another --output"):
        pretrain(path, "--epochs=1")


def test_no_frozen_prototypes_while_info_nce_trains(pretrain, tmp_path, capsys):
    with pytest.raises(SystemExit):
        pretrain(tmp_path / "recipe.pt", "--freeze-epochs=1")
    assert (
        "argument --freeze-epochs: must be 0, as 'PGCL, recommended' begins with InfoNCE"
        in capsys.readouterr().err
    )


def test_configurations_of_the_papers_rows_have_no_further_options():
    assert {row for row in rows.PRETRAINED if rows.recommended_options(row, 10)} == {
        rows.RECOMMENDED
    }
    config = {"row": "InfoNCE (GraphCL)", "freeze_epochs": 2}
    loss = {"weighting": "uniform", "exclude_same_cluster": False, "consistency_weight": 0.0}
    assert rows.options(config, 5) == {"freeze_steps": 10, **loss}
