"""Sequence parallelism: the tokens of one sample on several ranks, and attention across them."""
