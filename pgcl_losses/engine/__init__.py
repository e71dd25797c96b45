"""The contrast: its input (`pairs.py`), and two ways to compute it (`blocks.py`, `dense.py`)."""
