"""Techniques that trade compute for memory.

activation_checkpointing    blocks save their inputs alone and recompute the inside before their backward
chunked_loss                head and loss run on one chunk of tokens at a time
tiled_mlp                   MLPs run on one tile of tokens at a time
"""
