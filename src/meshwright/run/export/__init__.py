"""Export: a trained model in the formats of other libraries.

convert_pickle     converts a pickle of tensors, in a child process
hf_export          a folder that transformers loads
adapter_export     an adapter that peft loads
stored_tensors     names, shapes and dtypes of the tensors that are stored, and their values one by one
weight_source      the same tensors as a stream, for an engine that runs the model elsewhere
tokenizer_export   the tokenizer that the model was trained with, and its special tokens
roundtrip_check    compares an exported folder with the model here
"""
