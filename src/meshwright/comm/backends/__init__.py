"""Backends that execute the collectives of a Group.

process_group       torch.distributed: gloo on CPUs, NCCL on GPUs
threads             all ranks are threads of one process: exact and deterministic
thread_results      computes a collective of such ranks from the inputs of all
fake                one simulated rank of a large job; nothing is sent
async_work          Work objects of torch.distributed, waits with a limit
gloo_workarounds    collectives that gloo lacks or does slowly
comm_thread         a thread that runs collectives implemented in Python
run_algorithm       executes all-reduce algorithms on tensors
"""
