"""Rules by which weights are stepped, one per file: each is a `torch.optim.Optimizer` that says how finely weights may be cut.

SGD and AdamW are torch's own, fused. What there is, and which weight is stepped by which, stands in core/rules.py.
"""
