"""Kills, hangs and restarts, through the real command.

ddp_script       a plain DDP script, the peer of `elastic_restart`
disk_kills       20 kills of runs with states on disk
elastic_restart  recovery under torchrun after a random rank was killed
forked_command   forks the command and its ranks from a process that has done the imports
hang_reports     whether the report of a hang names the right rank and line
kill_trial       one run that is killed at random moments and resumed
planted_hangs    the model file of `hang_reports`, which hangs in a chosen way
resume_matrix    200 kill trials
restore_bytes    bytes of a checkpoint that each rank reads, against what it keeps
"""
