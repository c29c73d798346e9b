"""Context parallelism: the tokens of one sample on several ranks, and attention across them.

ring                       ring attention: keys and values are sent around the ring of ranks
ulysses                    Ulysses: all-to-all between tokens and heads
hybrid                     Ulysses inside groups of neighbours, a ring between groups
context_parallel_strategy  ContextParallel, the base of the three: layouts, diagnostics, planned collectives
attention_args_to_4d       the arguments of one attention call in four dims
ring_geometry              the ranks of a ring, their positions, and blocks of queries and keys
attention_kernel           attention with log-sum-exp: torch's kernels, and matmuls with a softmax
output_merge               merges the attention to several blocks of keys
block_mask                 block masks: which queries attend to which keys, and its cache
ring_attention             forward and backward around a ring
ulysses_all_to_all         the all-to-all between tokens and heads
conv_halo                  halo exchange of convolutions along the sequence
memory_model               memory of attention on a sequence shard
"""
