"""Benchmarks of the techniques that need less memory.

bounded_host    optimizer states on disk, within the memory that the plan says
gist            what autograd saves of ReLU and max pooling, encoded
"""
