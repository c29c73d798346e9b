"""Analysis of a user's model: trials on fake tensors, and what the plan learns from them.

analyze              deferred init, blocks, and the `ModelSpec` that one trial forward finds
forward_errors       what is wrong with a batch or a forward that fails
record_model         records the forwards that the analysis reads
repeated_forward     runs the forward again, and refuses one that computes something else
sharding_trials      the trials that need the layers of the model, which the first trial finds
memory_trial         the memory of each block call: a forward and a backward that count bytes
live_memory_tracker  counts the bytes of all live storages while a trial runs
expert_memory_trial  the memory of experts apart from that of the rest of their block call
find_model_loss      the loss of a model for which none is given, from a forward on other sizes
forward_graph_trace  the recorded forward graphs of a model, one per shape of its inputs
model_report         all that is known about a model in one value, shown by `meshwright inspect`
plan_for_model       checks of a plan against the model itself
"""
