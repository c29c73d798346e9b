"""Builds and edits the list of actions of a training step.

Modules:

    program                   Action, Transfer, Role, Program
    program_json              a program as plain values, and back
    memory                    names of memory, and bytes of activations per block call
    grad_dependencies         which actions complete gradients, and which read them
    chunked_loss_cost         the cost of a loss that computes its logits in chunks
    gradient_noise_actions    actions that measure the gradient noise scale
    matrix_owner_actions      owners of sliced matrices for optimizers that need the full matrix
    grad_reduce_scatter       reduce-scatter of gradients into shards
    simulator                 runs a program without devices: timeline and deadlocks
    single_device_program     the step of one device, which strategies rewrite
    tied_params               all-reduce of gradients of tied parameters
    unshard_windows           when sharded parameters are gathered and freed
    weight_stashing           weight versions of microbatches (PipeDream)
"""
