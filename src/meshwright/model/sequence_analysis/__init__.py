"""Analysis of how a model treats the sequence dim, for context parallelism.

analyze_sequence        follows the tokens of one forward on fake tensors, operation by operation
token_dims              prime sequence lengths, by which a token dim is known by its size
token_rules             per operation: whether it treats each token by itself
conv_rules              convolutions along the sequence, and the padding of models for them
block_input_token_dims  the token dims of the inputs of a block call, and their replacements in a trial
block_trace             what block calls do with tokens in one forward on all of them
equal_block_traces      block calls that equal an earlier one get its trace, and do not run
captured_tokens         tokens that a block puts into a side channel (router logits)
replicated_blocks       block calls that every rank runs on all tokens
glue_gather_trace       the tensors that glue gathers, and the block calls to which their gradients flow
trial_lengths           the lengths of a trial, and code that depends on the length
same_ops_on_shards      compares the operations of blocks on full sequences and on a sequence shard
"""
