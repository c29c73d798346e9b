"""Starting ranks: on this machine, under a launcher, and as job files for a scheduler.

cluster_env           rank, world size and master address from the launcher's environment
forked_process        a rank as a fork of the launching process, which spares it all imports
failure_record        how a rank failed, written to a file
host_memory_check     refuses ranks that keep more in the memory of this host than it has
parent_death          ends every rank when the launching process is gone
scheduler_scripts     job files for SLURM, Kubernetes and torchrun
join_world            joins this process to the other ranks
local_launcher        starts and watches the ranks of this machine
network_interfaces    network interfaces of this host
run_folder            claims the folder of a run: one attempt at a time
signals               SIGTERM, SIGINT, SIGUSR1: the flag that stops a run after a step; Ctrl-C before it
"""
