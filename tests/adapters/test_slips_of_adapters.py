"""Each mistake is an error on one line, which names the argument and says what came."""

import pytest
import torch
from helpers.batches import ring
from helpers.losses import DIM
from helpers.marks import assert_error

from pgcl_losses import InfoNCE

# Errors, calls, and the names and values that their messages have.
SLIPS = [
    # Fractions.
    (ValueError, "NodeDrop(1.0)", "p must", "below 1", "got 1.0"),
    (ValueError, "Subgraph(1)", "p must", "below 1", "got 1"),
    (ValueError, "EdgePerturb(float('nan'))", "p must", "from 0 to 1", "nan"),
    (TypeError, "AttributeMask('half')", "p must", "'half' (str)"),
    # Random choice.
    (ValueError, "RandomChoice([])", "transforms", "at least one"),
    (TypeError, "RandomChoice(keep, keep)", "transforms", "one list"),
    (TypeError, "RandomChoice(NodeDrop())", "transforms", "NodeDrop(p=0.2)"),
    (TypeError, "RandomChoice([NodeDrop])", "NodeDrop(...)"),
    (TypeError, "RandomChoice([keep, None])", "transforms[1]", "callable"),
    (TypeError, "RandomChoice([loss])", "transforms[0]", "callable"),
    # A model and its call.
    (TypeError, "model_of(keep, None)", "augment2", "callable"),
    (TypeError, "model_of(NodeDrop, keep)", "NodeDrop(...)"),
    (TypeError, "model_of(keep, loss, keep)", "encoder, augment1, augment2 and loss"),
    (TypeError, "model_of(keep, keep, loss)", "augment3", "callable"),
    (TypeError, "model_of(keep, keep, encoder=Encoder)", "encoder", "module"),
    (TypeError, "model_of(keep, keep, encoder=loss)", "encoder", "InfoNCE("),
    (TypeError, "model_of(keep, keep, encoder=NodeDrop())", "encoder", "in this order"),
    (TypeError, "model_of(keep, keep, loss=type(loss))", "InfoNCE(...)"),
    (TypeError, "model(batch, batch)", "one batch", "model(batch)"),
    (TypeError, "model(x=batch, edge_index=batch)", "encoder", "3 arguments"),
    (TypeError, "model()", "batch must be a"),
    # What is no batch, no view and no embedding.
    *(
        (TypeError, f"{takes_batch}(torch.ones(2))", "must be a", "Tensor")
        for takes_batch in ("NodeDrop()", "Subgraph()", "EdgePerturb()", "AttributeMask()", "model")
    ),
    (TypeError, "model(apart(batch))", "batch must be a", "list"),
    (TypeError, "model_of(keep, lambda batch: None)(batch)", "augment2", "NoneType"),
    (ValueError, "model_of(keep, lambda b: apart(b)[0])(batch)", "augment2", "1 graphs of 3"),
    (ValueError, "model_of(keep, keep, turned)(batch)", "graph 0", "augment3"),
    (ValueError, "encoded(torch.ones(7, DIM))", "7 emb", "augment1", "3 graphs", "27 nodes"),
    (ValueError, "encoded(torch.ones(5))", "[graphs, D]", "(5,)"),
    (ValueError, "encoded((torch.ones(3, DIM),))", "[graphs, D]", "tuple"),
    (ValueError, "unpooled(batch)", "embeddings of graphs"),
]


@pytest.mark.parametrize(("error", "call", "words"), [(*row[:2], row[2:]) for row in SLIPS])
def test_an_error_on_one_line_that_names_what_is_wrong(framework, error, call, words):
    drop, keep = framework.adapter.NodeDrop(0.9), torch.nn.Identity()
    batch = framework.batch_of([ring(9)] * 3)

    def encoded(result):
        model = framework.model_of(keep, keep)
        model.encoder.register_forward_hook(lambda *_: result)
        return model(batch)

    names = {**vars(framework.adapter), **vars(framework), "keep": keep, "loss": InfoNCE()}
    names |= {"batch": batch, "encoded": encoded, "torch": torch, "DIM": DIM}
    names["turned"] = lambda batch: framework.together(framework.apart(batch)[::-1])
    names["model"] = framework.model_of(keep, keep)
    names["unpooled"] = framework.model_of(drop, drop, encoder=framework.NodeEncoder())
    assert_error(error, call, words, names)
