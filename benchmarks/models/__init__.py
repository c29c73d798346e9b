"""Models that benchmarks train.

custom_models   a user's own file of model factories, for models that do not take plain text
llama_steps     training steps of small Llamas: plain loop, DDP, FSDP2, DeepSpeed, ours
model_coverage  which model families train without help
model_families  the families of `model_coverage`
paper_models    model shapes without values, of any size
"""
