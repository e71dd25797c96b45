"""Each mistake is an error on one line, which names the argument and says what came."""

import pytest
import torch
from helpers.batches import ring

from pgcl_losses import InfoNCE

SLIPS = [
    # Fractions.
    (ValueError, "NodeDrop(1.0)", "p must be a number of at least 0 and below 1, the fraction of"),
    (ValueError, "Subgraph(1)", "and below 1, the fraction of nodes to drop, but got 1"),
    (ValueError, "EdgePerturb(float('nan'))", "p must be a number from 0 to 1, but got nan"),
    (TypeError, "AttributeMask('half')", "p must be a number from 0 to 1, but got 'half' (str)"),
    # Random choice.
    (ValueError, "RandomChoice([])", "transforms must hold at least one transform, but"),
    (TypeError, "RandomChoice(keep, keep)", "transforms must be one list, as in RandomChoice([No"),
    (TypeError, "RandomChoice(NodeDrop())", "EdgePerturb()]), but got NodeDrop(p=0.2) "),
    (TypeError, "RandomChoice([NodeDrop])", "give an instance, NodeDrop(...)"),
    (TypeError, "RandomChoice([keep, None])", "transforms[1] must be a callable that makes a view"),
    (TypeError, "RandomChoice([loss])", "transforms[0] must be a callable that makes a view of a"),
    # A model and its call.
    (TypeError, "model_of(keep, None)", "augment2 must be a callable that makes a view of a"),
    (TypeError, "model_of(NodeDrop, keep)", "give an instance, NodeDrop(...)"),
    (TypeError, "model_of(keep, loss, keep)", "takes encoder, augment1, augment2 and loss"),
    (TypeError, "model_of(keep, keep, loss)", "augment3 must be a callable that makes a view of a"),
    (TypeError, "model_of(keep, keep, encoder=Encoder)", "encoder must be a module, but got <"),
    (TypeError, "model_of(keep, keep, encoder=loss)", "encoder must be a module, but got InfoNCE("),
    (TypeError, "model_of(keep, keep, loss=type(loss))", "give an instance, InfoNCE(...)"),
    (TypeError, "model(batch, batch)", "is called with one batch alone, model(batch)"),
    (TypeError, "model(x=batch, edge_index=batch)", "encoder itself, but got 3 arguments"),
    (TypeError, "model()", "batch must be a"),
    (ValueError, "unpooled(batch)", "for embeddings of graphs, the encoder ends with"),
]


@pytest.mark.parametrize(("error", "call", "text"), SLIPS)
def test_an_error_on_one_line(framework, error, call, text):
    drop, keep = framework.adapter.NodeDrop(0.9), torch.nn.Identity()
    names = {**vars(framework.adapter), **vars(framework), "keep": keep, "loss": InfoNCE()}
    names["batch"] = framework.batch_of([ring(9)] * 3)
    names["model"] = framework.model_of(keep, keep)
    names["unpooled"] = framework.model_of(drop, drop, encoder=framework.NodeEncoder())
    with pytest.raises(error) as caught:
        eval(call, names)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
