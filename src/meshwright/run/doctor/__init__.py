"""The checks of `meshwright doctor`.

host_checks    this host, without torch: Python and packages, cores, memory, disk, network, clock
gpu_checks     checks that need torch: GPUs, a collective among the ranks of a job
"""
