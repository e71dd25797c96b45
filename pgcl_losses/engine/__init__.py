"""The weighted sums over pairs: one contract (`contract.py`), several ways to compute it."""
