"""The command `search`: the fastest plans for a model on a machine.

plan_for_devices     `plan CONFIG --devices N`: chooses a mesh for a config without one
constraints          --set NAME=VALUE: choices that are given
machine              --hardware, --cluster and --calibrate-from: the machine
run_calibration      --calibrate-from: a run compared with the estimate of its plan
resolve_model_sizes  the sizes of MODEL, from text or from a config
no_result            the error when nothing fits
plot                 --plot: step time against memory
search               runs the search, prints and writes its result
best_plan_to_config  the best plan as the tables of a config
commented_config     these tables as a file with comments
"""
