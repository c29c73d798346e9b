"""Plans drawn by chance, each compared with one device or refused.

combinations   which refusals are allowed, and how often each pair of techniques must match
random_draws   draws a model, a mesh and strategies from a seed
random_models  the models that are drawn
random_plans   runs the drawn plans and compares them with one device
"""
