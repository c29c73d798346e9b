"""Data: from files, datasets and streams to the samples that a rank reads in a step.

documents_to_samples  packed texts and conversations as token samples
eval_samples          evaluation samples and the history of evaluation results
data_loader           the local batch of a rank for a global step, prepared ahead of its step
mixture               several data sources, mixed by weight
chat_template         conversations as tokens: which of them have labels
readers               lists and reads text files, JSONL files and Hugging Face datasets
shuffle               the stateless shuffle: an order that is computed, not stored
streaming             a dataset that is read in its own order, without a copy on disk
byte_text             text files as bytes
token_cache           tokens on disk, mapped into memory
tokenizer             tokenizers: bytes, or one of transformers
token_dataset         samples of a fixed length: windows of a token sequence, padded documents
"""
