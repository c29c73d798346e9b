"""Communication between ranks: collectives over mesh axes, their backends, their diagnosis and their tuning.

rendezvous       the store through which the processes of a job find each other
current_world    the world of a process that initialized torch.distributed by itself, and its device
world            init_world and TorchWorld: processes become the ranks of a mesh
disjoint_groups  the groups of a plan in batches, each of which is one split of a communicator
collectives      the interface (Group, World, Work), validation, ledger, differentiable redistribution
backends         torch.distributed, threads of one process, and one simulated rank of a large job
shared_memory    collectives between the ranks of one host without sockets
allreduce        all-reduce algorithms as data: ring, tree, recursive doubling, ...
tuning           measured all-reduce times, a network model fitted to them, `algorithm = "auto"`
watchdog         timeouts, desync detection and the report on a hang
"""
