"""One device, in an ordinary PyTorch loop: what every plan is compared with.

parity_case             what a comparison takes, and what one device has found
loss_and_gradients      the loss and the gradients of a batch, by the model's own forward and one backward
weight_version_replay   updates with one microbatch each, at older weights
arrival_replay          servers that take gradients as they arrive, in an order that ranks have reported
lost_steps              what codes leave out of each step, reported by ranks
recorded_run            both, of a run before the comparison
"""
