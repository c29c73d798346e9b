"""Optimizers over sharded parameters, the optimizer step, and the saved state.

    make_optimizers        parameter groups, the optimizers of a job or of the user
    optimizer_template     an optimizer of the user's module, made again over what a rank steps
    lr_schedule            the learning rates of a step: schedules of the job, schedulers of torch
    abstract_optimizer     base class of our optimizers; which optimizers accept which shard alignment
    adafactor              Adafactor
    adamw_8bit             AdamW with optimizer states in 8 bits
    adamw_bf16_states      AdamW with optimizer states in bfloat16
    lion                   Lion
    muon                   Muon
    optimizer_step         CLIP and STEP: gradient norm, clipping, optimizer step
    step_grad_scale        gradients clipped or divided while the optimizer reads them
    sharded_state_dict     what a rank saves and loads: parameters, buffers, optimizer states

`plan/optimizer_per_param.py` says which optimizer steps which weight. SGD and AdamW are torch's own fused
implementations.
"""
