"""Benchmarks of compressed communication."""
