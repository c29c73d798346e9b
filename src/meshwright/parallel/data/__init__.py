"""Data parallelism: ranks compute on different samples, and their gradients are summed.

batch_split             splits the samples of the global batch along an axis
ddp                     DDP: full replicas, gradients all-reduced in buckets during backward
ddp_naive               one all-reduce per parameter after the whole backward
data_parallel_master    one rank computes the loss and steps, as torch.nn.DataParallel does
zero                    ZeRO-1/2/3, FSDP and HSDP: sharded optimizer states, gradients and weights
hierarchical_partition  hpZ: a second shard of the weights in each host, for backward
sync_batch_norm         batch norms take the statistics of the samples of all ranks
"""
