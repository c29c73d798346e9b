"""Ranks beside the workers that train nothing, and run a function of the user on the weights.

observer      the technique: what workers show, and observers answer, at the end of a period
observations  what both send each other at run time, and the call of the function
"""
