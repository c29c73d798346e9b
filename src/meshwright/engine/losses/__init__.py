"""Losses that ranks, or chunks of tokens, compute together.

token_count            TOKEN_COUNT: what the loss is divided by, summed over all ranks
batch_sums             BATCH_SUM: sums over the global batch that an auxiliary loss reads
gathered_outputs_loss  losses over all samples of the global batch (contrastive)
vocab_parallel_logits  logits that are sharded along the vocabulary
chunked                LM head and loss computed for a chunk of tokens at a time
"""
