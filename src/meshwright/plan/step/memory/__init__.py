"""Memory of a step: its names in the program, and its bytes.

Modules:

    memory_names         names of the memory that actions allocate and free
    activation_copies    copies of activations to host memory and back
    activation_files     from there to the file of the rank and back
    kept_inputs          inputs that checkpointed block calls keep, and nothing else holds
    kept_outputs         outputs of operations that checkpointed block calls keep
    early_stop           products that a rerun leaves out
    block_call_memory    bytes of activations per block call on one rank
    tier_copies          checks of the copies between memory tiers
    model_states         bytes of weights, masters and optimizer states per parameter group on one rank
    activation_budget    what keeps or recomputes activations of a chain of block calls, for some bytes
    recomputed_segments  block calls in a row that run again from the input of the first
"""
