"""The programs that made the results: ``python -m experiments.unsupervised``, ``.map`` and others.

Rooms know the shelf, which holds what they share, and nothing of each other.
"""
