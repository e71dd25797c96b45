"""Handwritten digits as graphs: what PGCL gives on real graphs with many classes."""
