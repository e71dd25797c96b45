"""Whether the recommended setting is non-inferior to InfoNCE: ``python -m experiments.non_inferiority``."""
