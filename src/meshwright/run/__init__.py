"""Running a job: its config, data, processes, checkpoints, measurements, metrics and exports.

checkpoint    writes, verifies and loads checkpoints; resumes a run
config        reads config and plan files
data          samples of every step: readers, tokenizers, shuffling, prefetching
doctor        checks of this host and its GPUs
export        writes models for transformers and peft
launch        starts, joins and watches the ranks
measure       measured devices and networks; timing
serving       answers over the OpenAI HTTP API
telemetry     metrics, traces, logs, callbacks, trackers
training      the training loop and the public Trainer
"""
