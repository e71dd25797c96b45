"""Graphs clustered without labels: by prototypes, and by k-means on what each loss learned."""
