"""Benchmarks of generation on the shards that train.

compared_answers    runs one case and compares its answers with those of one device
generation_bytes    bytes that a forward sends and a cache holds: laws, ledgers and `plan`
generation_cases    the families and plans of `generation_parity`
grpo                rewards of GRPO on any number of ranks
grpo_speed          an iteration of GRPO beside generate and DDP
generation_sides    calls of `generate`, ours and those of transformers
generation_speed    their seconds, beside each other
lm_eval             tasks of lm-evaluation-harness under plans equal its own model of transformers
generation_parity   greedy and drawn answers of many families and plans equal one device
"""
