"""Losses that branch off from one InfoNCE run: ``python -m experiments.nodes.branches``."""
