"""Nodes of one graph, in GRACE's setting: ``python -m experiments.nodes``."""
