"""Contrast models in the way of PyGCL, ours or its own: embeddings, and values with gradients."""

import torch


def embeddings(num_graphs, num_nodes, dim=4):
    """Random embeddings of graphs ``[2, G, D]`` and of nodes ``[4, V, D]``, in float64."""
    shapes = (2, num_graphs, dim), (4, num_nodes, dim)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def called(model, g, h, batch=None, **masks):
    """The value of a contrast model, and its gradients by embeddings of graphs and nodes."""
    h1, h2, h3, h4 = h
    value = model(g1=g[0], g2=g[1], h1=h1, h2=h2, h3=h3, h4=h4, batch=batch, **masks)
    return value, *torch.autograd.grad(value, [g, h], materialize_grads=True)
