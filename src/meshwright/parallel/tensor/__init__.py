"""Tensor parallelism: the matrices themselves are divided."""
