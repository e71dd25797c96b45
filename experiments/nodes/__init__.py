"""PGCL beside InfoNCE on the nodes of one graph: ``python -m experiments.nodes``."""
