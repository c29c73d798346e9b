"""Describes a model as the plan needs it, without torch.

Modules:

    uneven_split        how one dim of a parameter is split among ranks
    layer_calls         calls of layers that tensor parallelism can shard
    model_spec          ModelSpec and ParamSpec: blocks and logical parameters
    op_costs            operations and bytes of each block call
    sequence_info       what a model does along the sequence
    stage_boundaries    values that cross pipeline stages, and their transfers
"""
