"""Chooses all-reduce algorithms from measurements.

allreduce_bench    measures all-reduce times over message sizes and algorithms
network_fit        fits a network model to the measured times
choose_size_rule   `algorithm = "auto"`: predicted times, and a rule by message size
"""
