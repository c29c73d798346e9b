"""From a model source to a module: deferred initialization and pretrained weights.

loader              loads a model from a config, a hub id or a Python factory
compiled_modules    takes torch.compile off a module and its submodules
deferred_init       deferred initialization: a module on the meta device, values made on demand
init_recorder       records what a constructor does to its parameters
init_tape           the recorded operations, and their replay for one parameter or some of its rows
module_weights      initial values read from a module that the user built
pretrained_weights  matches stored tensors with the parameters of a module
weight_conversion   converts between state_dict keys and the names in published files
safetensors_reader  reads tensors from safetensors files
scaled_down         a debug-size copy of a Hugging Face model config
"""
