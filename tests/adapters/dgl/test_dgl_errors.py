"""Graphs, arguments and encoders that DGL's adapter cannot take are errors that say why."""

import subprocess
import sys

import dgl
import pytest
import torch
from dgl.nn import GraphConv, Sequential, SumPooling
from helpers.dgl_cases import GIN, KINDS, batch_of, model_of, ring

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.dgl import AttributeMask, ContrastiveModel, NodeDrop


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_of_augmentations(kind):
    with pytest.raises(ValueError, match=r"p must be a number from 0 to 1, but got 1\.5"):
        kind(1.5)
    with pytest.raises(TypeError, match="p must be a number from 0 to 1, but got 'half'"):
        kind("half")
    with pytest.raises(TypeError, match="graph must be a DGLGraph, but got tuple"):
        kind()((batch_of([ring(3)]), torch.zeros(1)))
    with pytest.raises(TypeError, match=r"must be homogeneous, but has node types \['a', 'b'\]"):
        kind()(dgl.heterograph({("a", "to", "b"): ([0], [1])}))
    graph = batch_of([ring(3), ring(4)])
    if kind is not AttributeMask:
        graph.set_batch_num_nodes(torch.tensor([3, 3]))
        with pytest.raises(ValueError, match=r"7 nodes but batch_num_nodes\(\) adds up to 6"):
            kind()(graph)


def test_a_batch_that_forgot_its_graphs():
    graph = batch_of([ring(4)] * 3)
    with pytest.raises(
        ValueError, match=r"augment2 made 1 graphs of 3.*AddEdge .*forget the batch"
    ):
        model_of(augment2=dgl.AddEdge())(graph)
    with pytest.warns(UserWarning, match="the batch is one graph alone; dgl.add_self_loop"):
        model_of()(dgl.add_self_loop(graph))
    with pytest.raises(ValueError, match=r"returned 1 embeddings .* 3 graphs .*dgl.add_self_loop"):
        model_of(lambda view, feat: SumPooling()(dgl.add_self_loop(view), feat))(graph)


def test_errors_of_the_model():
    graph = batch_of([ring(4)] * 3)
    for result, got in ((torch.zeros(3), r"\(3,\)"), (None, "NoneType")):
        with pytest.raises(ValueError, match=rf"\[graphs, D\] or \[nodes, D\], but got {got}"):
            model_of(lambda view, feat, result=result: result)(graph)
    with pytest.raises(
        ValueError, match=r"encoder returned 2 embeddings for the view of augment1, which"
    ):
        model_of(lambda view, feat: torch.zeros(2, 16))(graph)
    with pytest.raises(
        TypeError, match="what augment1 returns must be a DGLGraph, but got NoneType"
    ):
        model_of(augment1=lambda graph: None)(graph)
    with pytest.raises(TypeError, match=r"augment2 must be .* got None .*torch.nn.Identity\(\)"):
        ContrastiveModel(GIN(), NodeDrop(), None, PGCLLoss(16))
    with pytest.raises(TypeError, match="batch must be a DGLGraph, but got list"):
        model_of()([graph])
    for encoder in (GIN(), None):
        with pytest.raises(TypeError, match=r"batch must be homogeneous.*dgl.to_homogeneous"):
            model_of(encoder)(dgl.heterograph({("a", "to", "b"): ([0], [1])}))
    with pytest.raises(ValueError, match=r"must have the feature 'attr', but have \['graph', "):
        model_of(feat_name="attr")(graph)
    message = r"missing .*: 'feat': .* feat_name=\.\.\.\), one of \['_ID', 'feat', 'graph'\]"
    for encoder in (GIN(), Sequential(GraphConv(3, 16), SumPooling())):
        with pytest.raises(TypeError, match=message):
            model_of(encoder, feat_name=None)(graph)
    with pytest.raises(TypeError, match=r"^object of type .int. has no len\(\)$"):
        model_of(lambda view: len(3), feat_name=None)(graph)


@pytest.mark.parametrize(
    "failure",
    ["ModuleNotFoundError('No module named dgl')", "FileNotFoundError('x.so')", "OSError()"],
)
def test_import_errors_name_the_extra(failure):
    code = f"""
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "dgl":
            raise {failure}
sys.meta_path.insert(0, Finder())
import pgcl_losses, pgcl_losses.adapters
try:
    import pgcl_losses.adapters.dgl
except ImportError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert failure.partition("(")[0] in result.stdout
    assert "pip install dgl==1.1.3 packaging, or in a checkout of" in result.stdout
    assert "pip install '.[dgl]'" in result.stdout
