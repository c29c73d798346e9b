"""Benchmarks of compressed communication.

compression_bytes    bytes that compressed gradients send, and memory of residuals, against formulas
compression_curves   losses of each codec beside those of exact sums, over three seeds
compression_links    steps with compressed gradients against exact ones, between two hosts
compression_parity   random plans with compressed gradients, each compared with one device
"""
