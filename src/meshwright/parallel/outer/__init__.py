"""Techniques in which sites train apart and meet in rounds: the axis `outer`.

diloco            an optimizer of its own steps the outer weights with how far the sites have moved on average
local_sgd         the parameters of all sites are averaged
round_averages    runs the averages of a rank, and the sums of what was counted in a round
rounds            what rounds are: who trains on what, when sites meet, and what they cannot share between
streaming_diloco  DiLoCo whose fragments of blocks are averaged in turn, while the sites train on
"""
