"""Whether the recommended setting holds what it promises: ``python -m experiments.recipe``."""
