"""The checks of `meshwright doctor`.

host_checks          this host, without torch: Python and packages, cores, memory, disk, network, clock
gpu_checks           the GPUs that torch sees, and NCCL
collective_checks    a collective among the ranks of a job, and their clocks
start_up             what the start of a job costs at any number of ranks: splits, store, metadata, restore
"""
