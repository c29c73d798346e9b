"""Parameters of one rank: flattened and sharded, sliced along a dim, or owned by one rank.

flat_param              one flat parameter: shard, full tensor, master, gradient
flat_param_store        all flat parameters of a rank: unshard, pack, reduce, accumulate, gather
master_weights          master weights outside of flat parameters; groups of stepped parameters
weight_stash            weights of earlier steps, for backwards that need them (PipeDream)
tensor_parallel_slices  slices of parameters along a dim (tensor parallelism), and their full values
offloaded_states        states and gradients that rest on the host, and their copies
delayed_steps           steps of the optimizers that a thread runs beside the next step
disk_states             states, masters and weights in a file, and the buffers that they pass through
rank_file               the file of a rank for what rests on disk, read and written by a thread
matrix_owners           optimizers of whole matrices: gather gradients to the owner, scatter its weights
gathered_weights        the values of weights that are gathered as codes, in one process, for the verifier
unshard_forward_hooks   full parameters for forwards and backwards outside of the action list
"""
