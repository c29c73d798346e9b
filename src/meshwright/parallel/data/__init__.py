"""Data parallelism: the batch is split, the gradients are summed."""
