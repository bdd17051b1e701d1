"""Long sequences: no memory as large as the square of their length, and what is computed in blocks is what is computed at once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from calibrate.collect.watch import observe
from calibrate.model import blocks, probe_layout
from tests.tiny import FAMILIES, tiny_model

IN_BLOCKS = {"mistral", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "deepseek_v3"}  # the others' masks are never made
LENGTH = 32768
MEGABYTES = 500  # one byte for every pair of tokens is 1,074

CHILD = """
import re, sys
from pathlib import Path
from calibrate.collect import collect
from tests.conftest import collect_run, rows_corpus
from tests.tiny import tiny_checkpoint

def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

folder, length = Path(sys.argv[1]), int(sys.argv[2])
for family in sys.argv[3:]:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32}
    path = tiny_checkpoint(folder / family, family, max_position_embeddings=length, **heads)
    collect(collect_run(path, rows_corpus([64])))
    run = collect_run(path, rows_corpus([length]), tokens_per_batch=length)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    statistics = collect(run)
    print(family, statistics.counted["tokens"], resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_memory_at_32k_tokens(tmp_path):
    """Full causal attention, sliding windows, and sinks, which transformers computes in plain operations."""
    families = ["llama", "mistral", "gpt_oss"]
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(LENGTH), *families]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = {family: (int(tokens), int(growth)) for family, tokens, growth in map(str.split, done.stdout.splitlines())}
    assert list(found) == families
    assert all(tokens == LENGTH and growth < MEGABYTES for tokens, growth in found.values()), found


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_give_what_attention_at_once_gives(family, monkeypatch):
    """K, V and Q of every layer in float32; blocks of a few queries, longer than the windows of these models."""
    model = tiny_model(family)
    layout = probe_layout(model)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 200, (2, 70)))
    whole = _seen(model, layout, ids)
    made = []
    monkeypatch.setattr(blocks, "LONG", 16)
    monkeypatch.setattr(blocks, "_ELEMENTS", 1500)
    monkeypatch.setattr(blocks._Rule, "block", lambda self, queries, keys: made.append(queries) or _BLOCK(self, queries, keys))
    in_blocks = _seen(model, layout, ids)
    assert bool(made) == (family in IN_BLOCKS)
    assert all(len(queries) < 70 for queries in made)
    assert whole.keys() == in_blocks.keys()
    for key, values in whole.items():
        torch.testing.assert_close(in_blocks[key], values, rtol=1e-4, atol=1e-4)


_BLOCK = blocks._Rule.block


def _seen(model, layout, ids) -> dict[tuple[int, str], torch.Tensor]:
    seen = {}
    observe(model, layout, ids, lambda index, kind, values: seen.setdefault((index, kind), values.clone()))
    return seen


def test_a_changed_copy_of_a_rules_mask_is_an_error_not_a_wrong_answer(monkeypatch):
    monkeypatch.setattr(blocks, "LONG", 8)
    model = tiny_model("mistral")
    query, key = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    module = model.model.layers[0].self_attn
    with blocks.masks_as_rules(model, 16):
        given = {
            "batch_size": 1,
            "q_length": 16,
            "kv_length": 16,
            "attention_mask": None,
            "allow_is_causal_skip": True,
            "device": torch.device("cpu"),
        }
        mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**given, local_size=4)
        with pytest.raises(RuntimeError, match="changes its attention mask"):
            blocks.attend(blocks.sdpa_attention_forward, module, query, key, key, mask.clone())
        other = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
        blocks.attend(blocks.sdpa_attention_forward, module, query, key, key, other)  # a mask of the model's own passes
