"""Benchmarks of the mixture of experts.

expert_routing  every routing against the loops of its paper
routing_loops   the algorithms of the papers, token by token
"""
