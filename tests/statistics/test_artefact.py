"""The `Statistics` value, its file and its merge."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.artefact import HEADER_KEY, write_tensors
from calibrate.errors import UsageError
from calibrate.statistics import CACHE_DTYPES, CODES, Statistics, merge, pack_layers
from tests.planted import observed_of, planted


def same(one: Statistics, other: Statistics) -> bool:
    return one.digest() == other.digest() and all(
        np.array_equal(getattr(seen, field), getattr(other.layers[index][kind], field))
        for index, kinds in one.layers.items()
        for kind, seen in kinds.items()
        for field in ("counts", "part_amax")
    )


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_code_is_torchs_bit_pattern_and_decodes_to_its_value(name):
    kind = CACHE_DTYPES[name]
    patterns = torch.arange(CODES, dtype=torch.int32).to(torch.int16)
    values = patterns.view(kind.dtype)
    assert np.array_equal(kind.decode(), values.double().numpy(), equal_nan=True)
    finite = values.isfinite()
    assert torch.equal(kind.encode(values.float())[finite], patterns[finite])
    assert torch.equal(kind.encode(-values.float())[finite], patterns[finite])  # the sign is dropped
    assert torch.equal(finite, patterns < kind.first_nonfinite)
    assert (np.diff(kind.decode()[: kind.first_nonfinite]) > 0).all()


def test_encoding_rounds_to_the_nearest_even():
    assert CACHE_DTYPES["bfloat16"].encode(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])).tolist() == [0x3F80, 0x3F82]


def test_a_saved_file_loads_to_the_same_value_and_saving_it_again_gives_the_same_bytes(tmp_path):
    statistics = planted()
    statistics.save(tmp_path / "a.safetensors")
    loaded = Statistics.load(tmp_path / "a.safetensors")
    assert same(loaded, statistics)
    assert loaded.provenance == statistics.provenance
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_the_digest_notices_one_count(tmp_path):
    changed = planted()
    changed.layers[1]["v"].counts[0, 5] += 1
    assert changed.digest() != planted().digest()
    changed.save(tmp_path / "changed.safetensors")
    assert Statistics.load(tmp_path / "changed.safetensors").digest() == changed.digest()  # loading takes it from the packed form


def test_a_file_does_not_grow_with_the_tokens(tmp_path):
    statistics = planted()
    statistics.save(tmp_path / "short.safetensors")
    for kinds in statistics.layers.values():
        for seen in kinds.values():
            seen.counts[...] *= 10**9
    statistics.save(tmp_path / "long.safetensors")
    assert (tmp_path / "long.safetensors").stat().st_size == (tmp_path / "short.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "not a readable safetensors file"),
        (b"not safetensors at all, whatever its name says", "not a readable safetensors file"),
    ],
)
def test_a_missing_or_foreign_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "s.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as caught:
        Statistics.load(path)
    assert str(path) in str(caught.value)


def test_a_truncated_file_and_one_of_another_schema_are_refused(tmp_path):
    path = tmp_path / "s.safetensors"
    planted().save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="not a readable safetensors file"):
        Statistics.load(path)
    write_tensors(path, {"x": np.zeros(1)}, {"schema": "kv-calibrate/scales/1"})
    with pytest.raises(UsageError, match="holds kv-calibrate/scales/1, not kv-calibrate/statistics/1"):
        Statistics.load(path)


def header_of(statistics: Statistics) -> dict:
    return json.loads(json.dumps(statistics._header()))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cache_dtype", "float8"),
        ("cache_dtype", None),
        ("layout", {}),
        ("layout", None),
        ("layout", {"model_type": "llama", "layers": [{"index": 7}]}),
        ("counted", {"tokens": "many"}),
        ("provenance", [{}]),
        ("provenance", None),
    ],
)
def test_a_damaged_header_is_one_line(tmp_path, key, value):
    statistics = planted()
    write_tensors(tmp_path / "s.safetensors", pack_layers(statistics.layers), {**header_of(statistics), key: value})
    with pytest.raises(UsageError, match="is damaged"):
        Statistics.load(tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.0.k.codes", lambda x: x + 40_000),
        ("layers.0.k.counts", lambda x: -x),
        ("layers.0.k.heads", lambda x: x[::-1]),
        ("layers.0.k.heads", lambda x: x * 2**50),
        ("layers.0.k.heads", lambda x: x[:-1]),
        ("layers.1.v.part_amax", lambda x: x[:2]),
        ("layers.1.v.sums", lambda x: x[:, :, :1]),
        ("layers.1.q.codes", None),
    ],
)
def test_damaged_tensors_are_one_line(tmp_path, name, change):
    statistics = planted()
    tensors = pack_layers(statistics.layers)
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).astype(tensors[name].dtype)
    write_tensors(tmp_path / "s.safetensors", tensors, header_of(statistics))
    with pytest.raises(UsageError, match="is damaged"):
        Statistics.load(tmp_path / "s.safetensors")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_random_corruption_loads_or_is_one_line_never_a_traceback(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    planted(layers=1).save(path)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1) | st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        loaded = Statistics.load(path)
    except UsageError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert loaded.layers[0]["k"].counts.min() >= 0


def test_a_header_that_is_no_object_is_refused(tmp_path):
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1)}, tmp_path / "s.safetensors", metadata={HEADER_KEY: "[1, 2]"})
    with pytest.raises(UsageError, match="no JSON object"):
        Statistics.load(tmp_path / "s.safetensors")


def test_merging_adds_counts_and_sums_exactly_in_any_order(tmp_path):
    rng = np.random.default_rng(3)
    tensors = [rng.normal(size=(2, 40, 8)).astype(np.float32) * 2.0**power for power in (-5, 0, 7)]
    files = []
    for number, values in enumerate(tensors):
        one = planted(seed=number)
        one.layers[0]["k"] = observed_of(values, part=number)
        files.append(one)
    merged = merge(files)
    whole = observed_of(np.concatenate(tensors, axis=1))
    got = merged.layers[0]["k"]
    assert np.array_equal(got.counts, whole.counts)
    assert np.array_equal(got.sums, whole.sums)
    assert np.array_equal(got.amax_codes, whole.amax_codes)
    assert merged.counted["tokens"] == sum(file.counted["tokens"] for file in files)
    for number, order in enumerate(([2, 0, 1], [1, 2, 0])):
        merge([files[index] for index in order]).save(tmp_path / f"{number}.safetensors")
    merge([merge([files[2], files[1]]), files[0]]).save(tmp_path / "nested.safetensors")
    contents = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(contents) == 1


def test_moments_of_an_observation_equal_numpys(tmp_path):
    values = np.random.default_rng(0).normal(3.0, 0.5, size=(2, 64, 8)).astype(np.float32)
    values = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    mean, variance = observed_of(values).moments()
    assert np.allclose(mean, values.astype(np.float64).mean(axis=1), rtol=1e-14)
    assert np.allclose(variance, values.astype(np.float64).var(axis=1), rtol=1e-12)


def test_merge_refuses_what_does_not_belong_together():
    one = planted(seed=1)
    with pytest.raises(UsageError, match="appear twice"):
        merge([one, planted(seed=1)])
    with pytest.raises(UsageError, match="appear twice"):
        merge([merge([one, planted(seed=2)]), one])
    with pytest.raises(UsageError, match="cache layouts or cache types"):
        merge([one, planted(seed=2, layers=3)])
    with pytest.raises(UsageError, match="cache layouts or cache types"):
        merge([one, dataclasses.replace(planted(seed=2), cache_dtype=CACHE_DTYPES["float16"])])
    with pytest.raises(UsageError, match="not of the same weights"):
        merge([one, planted(seed=2, fingerprint="other")])
    with pytest.raises(UsageError, match="nothing to merge"):
        merge([])


def test_merging_leaves_its_inputs_alone():
    files = [planted(seed=1), planted(seed=2)]
    before = [file.digest() for file in files]
    merge(files)
    assert [file.digest() for file in files] == before
