"""Pipeline schedules: bubbles, parity, planning time, and step time against torch.

nccl_deadlocks      schedules under what NCCL may make a rank wait for
pipeline_formulas   bubble and peak memory of every schedule, against the papers' formulas
pipeline_models     the models of the parity benchmark
pipeline_parity     pipelined steps against one device, in float64
pipeline_published  published bubble rates, against the simulation of our schedules
pipeline_scale      seconds to make, check and simulate the schedule of a large pipeline
step_ours_and_torch      one pipelined training step: a plain loop, torch, and ours
pipeline_vs_torch   step time of pipelines against torch.distributed.pipelining
sleeping_stages     stages that sleep for a fixed time, to measure schedules without computation
"""
