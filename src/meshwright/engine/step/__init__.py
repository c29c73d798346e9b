"""One training step of a rank: its action list, the handlers of the actions, and what looks at a whole step.

executor                runs the action list; what strategies may call
action_handlers         handlers by action kind
observed_sums           what sums of codes have left out, and whether they are as defined
observed_activations    what codes of activations have lost on all ranks
site_states             what sites that train apart save in one checkpoint, and read back
strategy_tensors        what techniques keep from step to step: made, saved, loaded, resharded
full_param_forwards     forwards of the whole model outside of steps: evaluation, generation, a user's own
expert_load_counter     counts the tokens that choose each expert
gradient_noise          gradient noise scale
spike_diagnosis         replays a harmful step to find the rank, block and parameter that caused it
model_state_memory      bytes that a rank holds, by category
broadcast_stage_params  full values of parameters and buffers on all pipeline ranks
"""
