"""Searches for the best parallel configuration of a model on a machine.

request              what is searched for, what is fixed, and what is invalid in it
candidates           every configuration that a request allows
search               the best configurations, in order of step time
lower_bounds         lower bounds on step time, to skip most configurations
data_parallel_first  data parallelism alone before what is hardly faster
heterogeneous        devices of several kinds
max_fit              the largest batch, sequence or depth that fits, the fewest devices
offload_when_needed  model states in host memory, where nothing fits without
lossy_when_allowed   gradients summed as codes, only where lossy results are allowed
model_fit            the largest model of a family, for each mode of offload
"""
