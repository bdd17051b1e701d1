"""A folder with the shape of Llama-3-8B and another model's tokenizer, for speed: `kv-calibrate bench FOLDER --dummy-weights`.

usage: python benchmarks/gpu/llama_shape.py FOLDER TOKENIZER_FOLDER
"""

import sys
from pathlib import Path

from transformers import AutoTokenizer, LlamaConfig

if __name__ == "__main__":
    folder, tokenizer = map(Path, sys.argv[1:])
    LlamaConfig(
        architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    print(folder)
