"""The words: what a plan is made of. Standard library only; nothing here imports torch."""
