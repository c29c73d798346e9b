"""Everything that is specific to the Hugging Face libraries: transformers, huggingface_hub, peft.

model_from_config   builds a transformers model from its config, also with code from its repository
hub                 resolves hub ids to local folders, and pins revisions
declared_tp_plan    what a transformers model declares: tensor-parallel plan, head, attention
cached_layers       what each layer caches of a sequence while tokens are generated
captured_outputs    tensors that transformers captures inside a block (router logits)
peft_name_map       adapted models: names of base weights and adapters
tokenizer_files     the tokenizer in a model's folder: which files it has, whether its ids fit the model
training_settings   turns off cache and checkpointing of a built model, and chooses its attention
"""
