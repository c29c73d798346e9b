"""Forwards in which each rank has a part of the tokens of each sample.

sharded_forward      the calls around the blocks of such a forward
token_shard          the tokens of a sample that this rank has
sharded_activation   a tensor with some of the tokens, which looks to glue as if it had all
partial_ops          a few of all tokens, or their sum, computed without gathering them
attention_call       calls of torch's attention, answered by a technique
conv_call            calls of torch's convolutions, answered by a technique
hf_attention         the attention interface of transformers, and biases by position
"""
