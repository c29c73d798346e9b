"""Metrics, logs, traces, trackers and callbacks of a run.

rank_profile       seconds, memory and bytes of a rank
activation_memory  the peak of the activations of a step
callbacks          functions that are called around the steps
logs               log records of every rank; warnings on the terminal
metrics_log        metrics.jsonl, and whether repeated steps are identical
expert_load_lines  load of experts, summed over steps
run_info           run_info.json: plan, versions and machine of a run
chrome_trace       a timeline of some steps for Perfetto and chrome://tracing
atomic_write       writes a file whole or not at all
trackers           TensorBoard, Weights & Biases, trackio, MLflow
"""
