"""Analysis of how tokens go through a model, for context parallelism.

analysis        follows tokens through one forward on fake tensors, operation by operation
token_dims      primes as numbers of tokens, so that a dim of tokens is known by its size
token_rules     what operations do with tokens: whether each token is treated by itself
conv_rules      convolutions over tokens, and what models put around tokens for them
block_inputs    the tensors with tokens that a block takes in, and their replacements in a trial
block_trace     what block calls do with tokens in one forward on all of them
gathers         the tokens that glue gathers, and the block calls that their gradients go back to
lengths         compares what blocks compute on samples of two lengths
runtime_check   compares blocks on the tokens of one device with blocks on those of a rank
"""
