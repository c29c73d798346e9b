"""Blocks: finds them in a model, and runs a forward and a backward whose graph is cut between them.

discovery                 finds the chain of blocks in the module tree
block_forward_backward    runs the model's own forward with the autograd graph cut at block boundaries
checkpointing             activation checkpointing of one block call
split_backward            splits a block's backward into input gradients (I) and weight gradients (W)
autograd_partition        which block call uses which parameter; tensors that bypass a block's outputs
inplace_writes_in_glue    in-place writes in the code between blocks
relu_activations          what autograd saves of ReLU and max pooling
saved_activations         counts what autograd saves inside each block call
recorded_block_calls      which block calls of a recording are equal, so that one of them runs in a trial
batch_coupling            layers that couple the samples of a batch (batch norm, max_norm, buffers)
rounded_layers            runs layers on one device with what codes have left of their values
user_checkpointing        torch.utils.checkpoint inside the model
"""
