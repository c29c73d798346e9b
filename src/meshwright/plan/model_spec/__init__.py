"""Describes a model as the plan needs it, without torch.

Modules:

    param_dim_split         how one dim of a parameter is split among ranks
    tensor_parallel_layers  calls of layers that tensor parallelism can shard
    block_patterns          patterns by which a technique chooses blocks
    model_spec              ModelSpec and ParamSpec: blocks and logical parameters
    op_sizes_and_memory     operations and bytes of each block call
    sequence_info           what a model does along the sequence
    stage_transfers         values that cross pipeline stages, and their transfers
    kv_cache_spec           what each layer caches of a sequence while tokens are generated
"""
