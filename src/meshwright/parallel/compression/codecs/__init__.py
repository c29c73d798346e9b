"""What travels in place of numbers.

block_codes      codes of chunks of elements, with what they all share
cast             codes of a narrower float: bfloat16, float16, float8
int4             codes of four bits, with a scale per block
int8             codes of one byte, with a scale per block
powersgd         matrices as two thin factors
sign             codes of one bit, with a scale per block
sliced_sums      sums of codes: one rank adds up each slice
topk             the largest elements, with their indices
two_level_sums   int4 codes within hosts, int8 codes between them (qgZ)
"""
