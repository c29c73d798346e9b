"""Benchmarks of generation on the shards that train.

compared_answers    runs one case and compares its answers with those of one device
generation_bytes    bytes that a forward sends and a cache holds: laws, ledgers and `plan`
generation_cases    the families and plans of `generation_parity`
grpo                rewards of GRPO on any number of ranks
grpo_speed          an iteration of GRPO beside generate and DDP
lm_eval             tasks of lm-evaluation-harness under plans equal its own model of transformers
generation_parity   greedy and drawn answers of many families and plans equal one device
"""
