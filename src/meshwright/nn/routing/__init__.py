"""Routings of a mixture of experts: which experts a token goes to, with which weights. One file per paper.

top_k           the k best experts of a token, none dropped
gshard          two experts with capacity, the second by chance
switch          one expert with capacity, noise before the router
expert_choice   the experts choose tokens
sigmoid_groups  sigmoid scores, a bias for the choice, experts in groups
routes          what a routing returns, and its interface
capacity        groups of tokens, and their places in an expert
losses          what balances a router: load balancing, z-loss
"""
