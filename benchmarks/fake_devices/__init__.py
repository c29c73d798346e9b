"""Plans on devices that compute nothing: what a rank asks of a GPU, without one.

combinations        the combinations that `fake_cuda` runs
families            the families of transformers among them
fake_cuda           runs all combinations, and compares their counts with the stored ones
rank_on_fake_cuda   one rank of a plan on a fake CUDA device: the counts of each phase
"""
