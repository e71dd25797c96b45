"""The contrast of a batch: which pairs of embeddings count, how much, and the loss they make.

Files here import only `pgcl_losses.base`. Begin with `rows`, which decides what counts; then `sums`
adds up negatives, `forms` has the losses of the literature, and `chunks` computes a whole batch.
"""
