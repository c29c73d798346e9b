"""Benchmarks of the techniques that need less memory.

gist    what autograd saves of ReLU and max pooling, encoded
"""
