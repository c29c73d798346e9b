"""Techniques that send fewer bytes: gradients are summed, weights gathered, and activations travel, as codes.

activation_compression   which activations travel as codes, and their gradients
codecs                   the codes: one file each
coded_sum                the parts of a sum, for each shard
gradient_compression     which gradients are summed as codes, along which axis, and what is owed to them
quantized_weights        weights that are gathered as codes of exact masters
residuals                what codes have lost, kept until the step is known to count
"""
