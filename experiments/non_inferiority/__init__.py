"""Whether InfoNCE, then PGCL, is non-inferior to InfoNCE, over all data sets."""
