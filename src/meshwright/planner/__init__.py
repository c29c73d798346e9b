"""Predicts the time and memory of a plan, and searches for the best parallel configuration.

machine         a machine's devices, links and efficiency: fitted, or measured
analytic        closed-form step time and memory of a parallel configuration
search          the configurations of a request, bounds on them, the best ones
program_cost    seconds of each action of a plan's program, and of a step
"""
