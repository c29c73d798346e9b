"""Pipeline parallelism: the layers of a model on several ranks.

pipeline_strategy    the strategy Pipeline: stages, their balance, and the schedule
pipedream            PipeDream: asynchronous 1F1B with weight stashing
send_recv_insertion  routes of boundary activations between stages, and their sends and receives
receive_prefetch     receives posted one run ahead, where they do not depend on it
schedules            who runs which stage for which microbatch: one file per schedule
"""
