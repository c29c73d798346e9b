"""Forwards on a sequence shard: each rank has some of the tokens of every sample.

block_input_sharding  shards inputs and wraps outputs of the blocks of a forward
token_shard           the tokens of this rank, and slices of full tensors for them
sharded_activation    a tensor with a local shard, which glue sees at full length
partial_sum_ops       indexing and sums over the sequence, without an all-gather
attention_call        intercepts torch's attention for a context-parallel strategy
conv_call             intercepts torch's conv1d for a context-parallel strategy
patch_hf_attention    transformers' attention functions and positional biases
"""
