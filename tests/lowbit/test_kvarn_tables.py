"""KVarN with tables: what each reads, that nothing else changes, and that tables of another model are refused."""

import numpy as np
import pytest
import torch

from calibrate.errors import UsageError
from calibrate.kvarn import KindTable, KVarNTables, LayerTable
from calibrate.kvarn.basis import key_basis, plain_basis
from calibrate.kvarn.hadamard import rotate
from calibrate.lowbit import Offline, Placement, make_format
from calibrate.model import probe_layout
from calibrate.statistics.second import Second
from tests.tiny import tiny_model

HEADS, DIM = 2, 64
PLAIN = plain_basis(HEADS, DIM)


def small_values(tokens: int = 512, seed: int = 0) -> torch.Tensor:
    """V far below VarN's floor, with uneven channels and a mean: [1, HEADS, tokens, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    uneven = torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(7)).exp()
    mean = torch.randn(HEADS, 1, DIM, generator=torch.Generator().manual_seed(8)) * 3
    tokens_differ = torch.randn(1, HEADS, tokens, 1, generator=generator).mul(0.5).exp()
    return 0.02 * (torch.randn(1, HEADS, tokens, DIM, generator=generator) * uneven * tokens_differ + mean)


def table_of(x: torch.Tensor, prescale: float) -> KindTable:
    counted = x[0].double()
    rotated = rotate(counted).var(dim=1).numpy()
    return KindTable(counted.mean(dim=1).numpy(), counted.var(dim=1).numpy(), rotated, np.full(HEADS, prescale, dtype=np.float32))


def tables(prescale: float = 256.0, layers: int = 1) -> KVarNTables:
    table = table_of(small_values(seed=1), prescale)
    return KVarNTables(tuple(LayerTable(index, f"layer {index}", table, table, PLAIN) for index in range(layers)), 128, 512)


def error(name: str, x: torch.Tensor, given: KVarNTables | None = None) -> float:
    got = make_format(name, Offline(tables=given)).value(x, 0, 128)
    return float((got - x).square().sum() / (x - x.mean(dim=2, keepdim=True)).square().sum())


def test_each_table_helps_values_below_the_floor():
    """In this order: as published, off the floor, without the mean. Tables come from other tokens than they are tried on."""
    x = small_values()
    published, prescale, mean = (error(f"kvarn_k2v2_g128{uses}", x, tables()) for uses in ("", "+prescale", "+mean"))
    assert prescale < 0.95 * published
    assert mean < 0.9 * prescale
    assert error("kvarn_k2v2_g128+channel", x, tables()) < 0.9 * prescale


def test_a_prescale_of_one_and_no_mean_is_the_published_method():
    x = small_values()
    assert error("kvarn_k2v2_g128+prescale", x, tables(prescale=1.0)) == error("kvarn_k2v2_g128", x)
    assert error("kvarn_k2v2_g128+prescale", x, tables()) != error("kvarn_k2v2_g128", x)


def test_prescaling_is_exact_to_the_bit():
    """A power of two moves exponents only: quantizing x·2^k and dividing is the prescaled format."""
    x = small_values() * 8  # no fp16 subnormals in the metadata
    got = make_format("kvarn_k4v4_g64+prescale", Offline(tables=tables(prescale=32.0))).value(x, 0, 128)
    assert torch.equal(got, make_format("kvarn_k4v4_g64").value(x * 32, 0, 128) / 32)


def test_static_scale_of_a_dead_channel_and_a_dead_head_is_finite():
    x = small_values(seed=1)
    x[0, 0, :, 3] = 0.0
    x[0, 1] = 0.0
    table = table_of(x, 4.0)
    given = KVarNTables((LayerTable(0, "layer 0", table, table, PLAIN),), 128, 512)
    fmt = make_format("kvarn_k2v2_g128+channel", Offline(tables=given))
    assert torch.isfinite(fmt.key(x, 0, 0)).all()
    assert fmt.value(x, 0, 0)[0, 1].abs().max() == 0


def keys_and_queries(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys with a few outlier channels and a direction that many channels share; queries that hardly read them: [1, HEADS, 512, DIM] each."""
    generator = torch.Generator().manual_seed(seed)
    key, query = (torch.randn(1, HEADS, 512, DIM, generator=generator) for _ in range(2))
    shared = torch.randn(1, HEADS, 512, 1, generator=generator) * torch.randn(DIM, generator=torch.Generator().manual_seed(9))
    size = torch.ones(DIM)
    size[::16] = 20
    return (key + 3 * shared) * size, query / size


def second(x: torch.Tensor) -> Second:
    vectors = x[0].double()
    covariance = torch.stack([torch.cov(head.T, correction=0) for head in vectors])
    return Second(np.full(HEADS, vectors.shape[1]), vectors.mean(dim=1).numpy(), covariance.numpy())


def test_bases_make_logits_more_exact_and_leave_values_alone():
    """Tables come from other tokens than they are tried on. Without outliers there is nothing to gain but the shared direction."""
    table = table_of(small_values(), 1.0)
    given = Offline(tables=KVarNTables((LayerTable(0, "layer 0", table, table, key_basis(*map(second, keys_and_queries(1)), 4.0)),), 128, 512))
    key, query = keys_and_queries(2)
    errors = {}
    for uses in ("", "+smooth", "+balanced"):
        fmt = make_format(f"kvarn_k2v2_g128{uses}", given)
        errors[uses] = float(((fmt.key(key, 0, 128) - key) @ query.mT).square().mean())
        assert torch.equal(fmt.value(key, 0, 128), make_format("kvarn_k2v2_g128").value(key, 0, 128))
    assert errors["+smooth"] < 0.25 * errors[""]
    assert errors["+balanced"] < 0.5 * errors["+smooth"]


@pytest.mark.parametrize("uses", ["mean", "channel", "smooth", "balanced"])
def test_a_group_is_stored_alike_whatever_is_stored_with_it(uses):
    table = table_of(small_values(seed=1), 256.0)
    basis = key_basis(*map(second, keys_and_queries(1)), 4.0)
    fmt = make_format(f"kvarn_k4v2_g64+{uses}", Offline(tables=KVarNTables((LayerTable(0, "layer 0", table, table, basis),), 128, 512)))
    for convert, x in ((fmt.key, keys_and_queries(2)[0]), (fmt.value, small_values())):
        together = convert(x, 0, 128)
        assert torch.equal(together, torch.cat([convert(part, 0, 128) for part in x.split(64, dim=2)], dim=2))


def test_layers_that_the_tables_propose_stay_in_16_bits():
    with pytest.raises(UsageError, match="propose no layer for 16 bits: kvarn_k2v2_g128\\+layers is the same as kvarn_k2v2_g128"):
        make_format("kvarn_k2v2_g128+layers", Offline(tables=tables()))
    model = tiny_model("llama")
    layout, heads, dim = probe_layout(model), 2, 32
    table = KindTable(*(np.ones((heads, dim)),) * 3, np.ones(heads, np.float32))
    given = KVarNTables(tuple(LayerTable(index, "", table, table, plain_basis(heads, dim)) for index in range(3)), 128, 512, sixteen_bit_layers=(1,))
    fmt = make_format("kvarn_k2v2_g128+layers", Offline(tables=given))
    assert Placement(layout, fmt, torch.bfloat16, model.config).whole == {0, 2}
    key = torch.randn(1, heads, 128, dim, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fmt.key(key, 0, 128), make_format("kvarn_k2v2_g128").key(key, 0, 128))


def test_bytes_do_not_grow_and_digests_differ():
    plain, given = make_format("kvarn_k4v2_g128", Offline(tables=tables())), make_format("kvarn_k4v2_g128+mean", Offline(tables=tables()))
    assert plain.token_bytes(4, 64, 64) == given.token_bytes(4, 64, 64)
    assert plain.digest is None
    assert given.digest not in (None, make_format("kvarn_k4v2_g128+mean", Offline(tables=tables(prescale=2.0))).digest)


def test_missing_and_foreign_tables_are_refused():
    with pytest.raises(UsageError, match="reads KVarN tables and none were given"):
        make_format("kvarn_k4v2_g128+mean")
    with pytest.raises(UsageError, match="no low-bit format is called 'kvarn'"):
        make_format("kvarn")
    model = tiny_model("llama")  # three layers, two heads of 32
    layout = probe_layout(model)
    for given, message in ((tables(), r"\(2, 64\) k heads and channels in layer 0"), (KVarNTables((), 128, 0), "no layer 0")):
        with pytest.raises(UsageError, match=message):
            Placement(layout, make_format("kvarn_k4v2_g128+mean", Offline(tables=given)), torch.bfloat16, model.config)
