"""The planner's predictions: against runs on this machine, and against published runs.

interleaved_device_bench  `bench device`, interleaved with the steps of a plan
known_estimates           well-known estimates, derived by the planner
twelve_plans            the plans of `planner_here` and of the two beside it, as one rank runs them
planner_compression       step time and memory of plans with codes on this machine, predicted and measured
planner_experts           step time of published runs of models with experts, predicted and measured
planner_fit               whether the planner predicts which published runs fit and which ran out of memory
planner_here              step time and memory of twelve plans on this machine, predicted and measured
planner_memory            peak memory of published runs, predicted and measured
planner_offload         step time and memory of plans with offload on this machine, likewise
planner_published         step time of published runs, predicted and measured
planner_speed             seconds of a search for a configuration on thousands of devices
"""
