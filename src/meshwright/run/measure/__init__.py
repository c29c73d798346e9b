"""Measurements: of devices, of networks, and of previous runs.

resolve_auto_allreduce  replaces `algorithm = "auto"` by a rule from measured links
device_bench            times matrix products, attention and memory of a device
coding_bench            times the codecs of compressed gradients
count_graphs            counts the graphs that a compiler makes of the blocks of a plan
compile_ahead           compiles those graphs into torch's cache folder
host_bench              times copies between host and device, and AdamW on the host
hardware_file           what `--hardware` names
profile_files           reads and writes device.toml
cluster_file            reads and writes cluster.toml
previous_run            step time, compute time and messages of a previous run
operation_timer         repeats operations and measures their seconds
jitter                  how much the time of equal work varies on a device
"""
