"""How embeddings are assigned to prototypes, and how k-means finds prototypes to begin with.

Files here import only `pgcl_losses.base`. Begin with `sinkhorn`, the balanced assignment.
"""
