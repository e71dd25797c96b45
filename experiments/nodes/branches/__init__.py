"""Rows that go on from one InfoNCE run: ``python -m experiments.nodes.branches``."""
