"""Whether the recommended setting is non-inferior to InfoNCE: ``python -m experiments.recipe``."""
