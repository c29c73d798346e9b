"""Results of `meshwright search`, as text and as pages.

search_result         the scenario, the ranking, and why the first configuration comes first
assumptions_and_cost  what the estimates assume; days, cost and energy of a training
search_page           an HTML page of step time against memory
max_fit               the largest batch, sequence or depth that fits, and what stops one more
model_fit             the largest model for each mode of offload
"""
