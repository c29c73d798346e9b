"""What `meshwright doctor` checks.

host_checks    whether this host can train: cores, memory, network interfaces, storage, versions
gpu_checks     whether the GPUs of this host can be used, and reach each other
"""
