"""Analysis of which layers of a model can be sharded, and how, for tensor parallelism.

layer_roles             every module with parameters of its own, its kind, and how it may be split
layer_pairs             the layers that can be sharded, from a trial and their roles
feature_flow            follows the features of linear layers through a trial
feature_id_propagation  what every operation of torch does to the features of its tensors
colwise_rowwise_groups  groups of layers that are sharded together, and their size attributes
residual_stream_trace   the path of the residual stream through the model
shared_sum_trace        rowwise layers whose outputs end in one sum
norm_formulas           norms over a last dim that is sharded over ranks
vocab_split_search      embeddings and heads that can be sharded along the vocabulary
split_proposal          the proposed split of every layer, and the slice of one rank
"""
