"""The fake-tensor trial: one forward without values shows what the module tree does not say.

accelerator_autocast   the rules of autocast on the device that trains
accelerator_norms      what norms keep on the device that trains, and what differs between devices
fake_tensor_forward    runs the trial and collects its findings
experts_calls          calls of the experts of a mixture of experts
expert_slices          splits of the matrices of each expert, found by a trial
kept_outputs           what matrix products and attention return, for checkpointed block calls
layer_costs            flops and saved activations of each layer call
op_counter             sizes of matrix products, attention and memory-bound operations
output_graphs          outputs that a model computes over all samples, such as an auxiliary loss
weight_slice_trial     runs the model on slices of its weights, to check a proposed split
shardable_layers       layers that can be sharded, and why the others cannot
value_dependent_sizes  tensors with a size that depends on values
"""
