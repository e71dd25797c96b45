"""Graph classification without labels, by PGCL and its baselines."""
