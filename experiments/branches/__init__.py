"""Rows that go on from one InfoNCE run, on real graphs: ``python -m experiments.branches``."""
