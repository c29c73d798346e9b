"""Benchmarks of compressed communication.

compression_links    steps with compressed gradients against exact ones, between two hosts
compression_parity   random plans with compressed gradients, each compared with one device
"""
