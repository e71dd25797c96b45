"""Weighted sums over pairs of embeddings: one contract (`pairs.py`), three ways to compute it."""
