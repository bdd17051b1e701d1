"""Every format computes where its tiles are: torch's meta device stands for a GPU, and an operation between two devices fails on any host."""

import numpy as np
import pytest
import torch

from calibrate.kvarn import KindTable, KVarNTables, LayerTable
from calibrate.kvarn.basis import plain_basis
from calibrate.lowbit import FORMATS, Codebooks, LowBitCache, Offline, Placement, make_format
from calibrate.lowbit.additive import CODES, ENTRIES, GROUP, LayerCodebooks
from calibrate.model import probe_layout
from tests.tiny import tiny_model

HEADS, DIM, TOKENS = 2, 64, 512
ELSEWHERE = torch.device("meta")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=6, head_dim=DIM)


@pytest.fixture(scope="module")
def offline():
    table = KindTable(*(np.ones((HEADS, DIM)) for _ in range(3)), np.ones(HEADS, dtype=np.float32))
    tables = KVarNTables(tuple(LayerTable(index, f"layer {index}", table, table, plain_basis(HEADS, DIM)) for index in range(6)), 128, 512, (1,))
    groups = DIM // GROUP
    key = np.ones((HEADS, groups, 2, ENTRIES, GROUP // 2, 2), dtype=np.float32)
    value = np.ones((HEADS, groups, 2, CODES, GROUP), dtype=np.float32)
    books = {index: LayerCodebooks(key, value, np.ones(DIM // 2)) for index in range(6)}
    return Offline(tables=tables, codebooks=Codebooks(books, {}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_stays_on_its_device(model, offline, name):
    config = model.config.get_text_config(decoder=True)
    cache = LowBitCache(config, Placement(probe_layout(model), make_format(name, offline), torch.bfloat16, config))
    for tokens in (TOKENS, TOKENS, 1):
        states = torch.empty(1, HEADS, tokens, DIM, dtype=torch.bfloat16, device=ELSEWHERE)
        read = cache.update(states, states.clone(), 2)
    assert [one.device for one in read] == [ELSEWHERE, ELSEWHERE]
    assert [one.dtype for one in read] == [torch.bfloat16, torch.bfloat16]
    assert read[0].shape == (1, HEADS, 2 * TOKENS + 1, DIM)
    assert cache.quantized_tokens()[2, "keys"] >= TOKENS


def test_the_check_fails_where_devices_are_mixed():
    with pytest.raises(RuntimeError, match="device"):
        torch.empty(4, device=ELSEWHERE) + torch.empty(4)
