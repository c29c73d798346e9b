"""Techniques that trade compute, or copies to the host or a disk, for memory.

activation_checkpointing    blocks save only their inputs and recompute the rest before their backward
activation_offload          what blocks keep for their backward rests in host memory meanwhile
block_patterns              patterns by which a technique chooses blocks
budgeted_chain              the block calls of a rank as `memory_budget` sees them: bytes, seconds, options
chunked_loss                LM head and loss run on one chunk of tokens at a time
disk_offload                optimizer states rest in a file for each rank; the host steps them in buffers
offload_actions             actions and refusals that both share
gist                        results of ReLU and max pooling rest as bits and nonzero values
gist_encodings              these encodings, while a block runs
kept_tensor_copies          the copies of what blocks keep, to the host and back
memory_budget               blocks keep, recompute or encode activations, as fast as a number of bytes allows
offload                     model states rest in host memory; the device or the host steps them
partitioned_activations     ranks along tp each keep a part of what checkpointed blocks keep
tiled_mlp                   MLPs run on one tile of tokens at a time
"""
