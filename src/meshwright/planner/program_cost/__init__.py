"""Predicts the time and memory of a plan from its program, action by action.

action_cost        seconds of each action
device_time        seconds of single operations on a device
network_time       seconds of collectives and messages
core_contention    ranks that share the cores of a host
straggler_waits    waits for the slowest rank of a collective
prediction         seconds of a step, and where they go
compression_gain   from which link speed on compressed sums pay
rank_memory        bytes of the model states, and the peak of a step
generation_cost    least seconds of generation, and what it sends
kv_cache_memory    bytes of keys and values while tokens are generated
"""
