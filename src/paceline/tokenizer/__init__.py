"""Text to token ids and back. Imports neither torch nor transformers: the HTTP process loads it.

Does not know the model's weights, requests or HTTP.
"""

from paceline.tokenizer.eos import gguf_eos_token_ids, hf_eos_token_ids
from paceline.tokenizer.facade import IncrementalDetokenizer, Tokenizer, load_tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "gguf_eos_token_ids", "hf_eos_token_ids", "load_tokenizer"]
