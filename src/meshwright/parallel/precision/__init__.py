"""Techniques that compute products in fewer bits.

fp8    linear layers multiply in float8, by torchao
"""
