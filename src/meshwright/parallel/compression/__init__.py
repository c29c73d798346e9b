"""Techniques that send fewer bytes: gradients are summed, and activations travel, as codes.

activation_compression which activations travel as codes, and their gradients
block_codes            codes of chunks of elements, with what they all share
cast                   codes of a narrower float: bfloat16, float16, float8
coded_sum              the parts of a sum, for each shard
gradient_compression   which gradients are summed as codes, along which axis, and what is owed to them
int4                   codes of four bits, with a scale per block
int8                   codes of one byte, with a scale per block
powersgd               matrices as two thin factors
residuals              what codes have lost, kept until the step is known to count
sign                   codes of one bit, with a scale per block
sliced_sums            sums of codes: one rank adds up each slice
topk                   the largest elements, with their indices
"""
