"""One pipeline stage of a model: its forward runs with the blocks of all other stages stubbed.

forward_recorder    the values that are live at the boundaries between blocks
forward_graph       the recorded forward: what each block call returns, and what glue computes from it
stage_forward       runs one stage by calling the model's own forward
remote_values       placeholder tensors and received values for the blocks of other stages
rounded_values      runs all stages on one device, each with what codes have left of its inputs
microbatch_replay   replays glue and block calls of a stage without the model's own forward
"""
