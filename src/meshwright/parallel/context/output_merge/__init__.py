"""Merges the attention of queries to several blocks of keys, block by block.

merge_outputs    two outputs with their log-sum-exp become one, in place
triton_merge     the same as one kernel of Triton
decode_attention attention of new tokens that all ranks have, to keys that are divided over the ranks
"""
