"""The model's forward and backward on one rank: in a step, in an evaluation, and outside of both.

microbatch_forward          the forward of one microbatch, or of one of its stages
backward_handlers           B, its halves I and W, and reruns: the backward of one block call
block_redistributions       collectives inside a block, once per tensor
stage_send_recv             sends and receives between pipeline stages
observed_codes              what codes of activations lose, for the verifier
context_parallel_forward    forwards on this rank's tokens of each sample (context parallelism)
step_rng                    random numbers by global sample
graph_cut_check             whether the graph is cut at blocks, and whether gradients reach every parameter
evaluation                  the loss over samples that are not trained on
pipelined_eval              forwards of an evaluation through pipeline stages
pipelined_eval_order        the order of their receives, runs and sends, as data
lockstep_pipeline_forward   forwards outside of steps, such as generation, on all pipeline ranks together
"""
