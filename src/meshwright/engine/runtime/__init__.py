"""The state of a rank during training: batch, loss, process groups, precision, guard and profiler.

build_module                    the module that a rank trains, and its stateless dropout
rank_state                      the state of a rank in a step, the trained module, the metrics of a step
grad_bucket                     gradients of several parameters in one buffer
microbatches                    a rank's batch, split into microbatches
async_copies                    copies between host and device that the host does not wait for
host_memory                     memory of the host, and copies between it and the device
mixed_precision                 the float16 loss scale, gradient norms, dtype checks
loss_guard                      detection of loss spikes and of steps that are not finite
comm_groups                     the process groups of a plan
module_patches                  replaced forwards of modules
step_profiler                   the time of each action of a step
cpu_allocator                   freed memory that stays with a CPU process; model states in huge pages
"""
