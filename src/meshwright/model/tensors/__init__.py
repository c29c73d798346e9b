"""Building blocks for code that runs, records or replaces operations on the tensors of a user's model.

counter_rng           random numbers as a hash of (key, element index), without a generator state
call_description      the name of a torch call, the line that makes it, its constant arguments
clear_fake_caches     clears functools caches in which a model's code keeps fake tensors
fake_tensor_limits    errors that say what fake tensors cannot do
float64_mode          function mode that turns every cast to float32 into one to float64
function_modes        function and dispatch modes over the code between blocks
garbage_collection    pauses Python's garbage collector during an analysis
inplace_leaf_alias    non-leaf alias of a leaf, which may be written in place
lazy_mapping          mapping of named tensors that are made on access
placeholder           tensor subclass with shape, dtype and device, and no values
pytree                finds, replaces and copies tensors in nested containers
select_token_ranges   selects ranges of token positions along a dim
"""
