"""Closed-form models of a training step, from sizes alone: microseconds per configuration.

model_shape              the sizes of a transformer
parallel_config          ranks per axis, schedule, ZeRO stage, recomputation
layer_time               seconds of a layer
expert_time              seconds of the experts of a layer, and of the rows that travel to them
closed_form_step_time    seconds of a step
closed_form_memory       bytes of the fullest rank
offload_cost             what offload frees on the device, keeps on the host, and copies
compression_cost         seconds, bytes and residuals of gradients that are summed as codes
memory_coefficients      what a code base keeps in memory, in bytes per element
calibrate                fits the constants of a machine to measured steps
"""
