"""Generates tokens with the weights that a rank trains, under any plan.

sampling_params     what a caller asks for, the answers, and what is refused
token_sampler       the next token of each row from its logits, on a divided vocabulary too
kv_cache            sequences of a cache are kept, joined and copied; its columns, and its bytes
decode_context_parallel  a cache whose columns are divided over the ranks along cp, and attention to it
cached_forward      the model's own forward on new tokens, with its cache of keys and values
generation_step     one forward of the sequences of a rank, and their next tokens
continuous_batch    which sequences run together: one that ends makes room for the next
stage_forwards      forwards through the stages of a pipeline: hidden states and tokens alone are sent
routed_experts      which experts tokens have gone through, recorded and replayed
answer_logprobs     log-probabilities of answers that are given, in one forward
serving_loop        requests that arrive while others run, from rank 0 to all ranks
generate            which rank continues which prompts, until all have ended; answers on every rank
"""
