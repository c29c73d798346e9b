"""Benchmarks of the techniques that need less memory.

gist             what autograd saves of ReLU and max pooling, encoded
memory_budget    choices for a number of bytes, beside trying everything, greedy, and torch
random_chains    random chains of block calls, and every choice for them
"""
