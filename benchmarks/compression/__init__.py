"""Benchmarks of compressed communication.

activation_parity    random pipelines with compressed activations, each compared with one device
compression_bytes    bytes that compressed gradients send, and memory of residuals, against formulas
compression_cost     the time to code gradients on one core, in casts to bfloat16
compression_curves   losses of each codec beside those of exact sums, over three seeds
compression_links    steps with compressed gradients against exact ones, between two hosts
compression_resume   held-out losses behind a resume on other ranks, with what codes owe and without
compression_vs_peers  steps with compressed gradients beside those of torch's hooks and of DeepSpeed
compression_parity   random plans with compressed gradients, each compared with one device
zero_plus_plus_parity  random plans with hpz and quantized_weights, each compared with one device
"""
