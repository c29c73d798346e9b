"""Benchmarks of compressed communication.

compression_bytes    bytes that compressed gradients send, and memory of residuals, against formulas
compression_links    steps with compressed gradients against exact ones, between two hosts
compression_parity   random plans with compressed gradients, each compared with one device
zero_plus_plus_parity  random plans with hpz and quantized_weights, each compared with one device
"""
