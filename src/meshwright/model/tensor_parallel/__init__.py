"""Analysis of which layers of a model can be sharded, and how, for tensor parallelism.

layer_roles       every module with parameters of its own, its kind, and how it may be split
layer_pairs       the layers that can be sharded, by a trial run and by their roles
feature_flow      follows the features of linear layers through a trial run
feature_rules     what every operation of torch does to the features of its tensors
pair_search       the layers that can be sharded together, read off the followed features
residual_stream   the way of the residual stream through the model
joint_sums        rowwise layers whose outputs end in one sum
norm_formulas     norms over the last dim that ranks with a slice of it compute together
vocab_split       embeddings and heads that can be sharded along the vocabulary
slice_plan        how every layer is cut, and the layers that must know the sizes of a slice
"""
