"""Places every tensor of a step on the mesh.

Modules:

    expert_load           how many tokens choose each expert, and which rank has it
    flat_param            flat parameters: parameters of a group concatenated and cut into equal shards
    mesh                  the device mesh and its axes
    param_sharding        the placements of a parameter; parameter groups
    tensor_placements     R, I, S, P and the redistributions between them
    rank_view             RankView: the parameters, slices and stage of one rank
    rank_work_share       the fraction of work and memory of one rank
    sequence_sharding     the tokens of a sequence on each rank: zigzag, striped, contiguous
    shard_boxes           the boxes of a tensor that hold a shard of it
    sharding_plan         ShardingPlan: the layouts of batch, activations and parameters on all ranks
    stage_value_shards    the local shapes of values that cross pipeline stages
"""
