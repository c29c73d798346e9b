"""Techniques that trade compute, or copies to the host or a disk, for memory; and compiled blocks.

activation_checkpointing    blocks save only their inputs and recompute the rest before their backward
block_compiler              compiles the forwards of a rank's blocks, and notes their graphs
budgeted_chain              the block calls of a rank as `memory_budget` sees them: bytes, seconds, options
chunked_loss                LM head and loss run on one chunk of tokens at a time
compiled_blocks             torch.compile makes few kernels of the operations of each block
early_stop                  reruns leave out the last product of a block, which no backward reads
gist                        results of ReLU and max pooling rest as bits and nonzero values
gist_encodings              these encodings, while a block runs
memory_budget               blocks keep, recompute or encode activations, as fast as a number of bytes allows
partitioned_activations     ranks along tp each keep a part of what checkpointed blocks keep
selective_outputs           keeps outputs of operations in the first run of a block, for its rerun
tiers                       what rests in the memory of the host, or on disk
tiled_mlp                   MLPs run on one tile of tokens at a time
"""
