"""From statistics to scales: which populations are solved together, who shares a scale, what is refused."""

import numpy as np
import pytest
import torch

from calibrate.artefact import write_tensors
from calibrate.errors import UsageError
from calibrate.scales import FORMATS, POLICIES, PolicyOptions, Population, Scales, solve
from calibrate.statistics import CACHE_DTYPES, Statistics
from tests.planted import layer_entry, observed_of, planted

VALUES = CACHE_DTYPES["bfloat16"].decode()


def alone(counts: np.ndarray, **options) -> float:
    """The scale of these counts solved by themselves: counts [heads, codes] are one population."""
    chosen = PolicyOptions(**options)
    population = Population.of(counts.sum(axis=0, keepdims=True), VALUES)
    return float(np.float32(POLICIES[chosen.policy](population, FORMATS[chosen.number_format], chosen)[0]))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_scale_a_tensor_is_solved_over_all_heads(policy):
    statistics = planted()
    scales = solve(statistics, PolicyOptions(policy=policy))
    assert scales.warnings == ()
    for layer in scales.layers:
        for kind, scale in layer.items():
            assert scale.dtype == np.float32
            assert scale.tolist() == [alone(statistics.layers[layer.index][kind].counts, policy=policy)]


def test_per_head_the_query_heads_of_a_group_share_one_scale():
    statistics = planted()
    for layer in solve(statistics, PolicyOptions(granularity="head")).layers:
        seen = statistics.layers[layer.index]
        for kind in ("k", "v"):
            whole, amax = alone(seen[kind].counts), statistics.values()[seen[kind].amax_codes]
            assert getattr(layer, kind).tolist() == [whole / 2 ** int(np.log2(amax.max() / each)) for each in amax]
        first, second = alone(seen["q"].counts[:2]), alone(seen["q"].counts[2:])  # heads 0 and 1 read KV head 0
        assert layer.q.tolist() == [first, first, second, second]


@pytest.mark.parametrize("kind", ["k", "v"])
def test_heads_share_a_place_in_the_octave_each_in_its_own_range(kind):
    rng = np.random.default_rng(3)
    ranges = np.array([300.0, 1.0, 2.0**-12, 0.0])
    values = rng.uniform(-1, 1, size=(4, 40, 8)) * ranges[:, None, None]
    values[:, 0, 0] = ranges
    statistics = planted(layers=1, entries=[layer_entry(0, heads=4, kv_heads=4)])
    statistics.layers[0][kind] = observed_of(values)
    scales = solve(statistics, PolicyOptions(granularity="head"))
    (layer,) = scales.layers
    floors = 2.0 * statistics.values()[statistics.layers[0][kind].amax_codes] / 448
    whole = alone(statistics.layers[0][kind].counts)
    found = getattr(layer, kind)
    alive = found[:3].astype(np.float64)
    assert (np.frexp(alive)[0] == np.frexp(whole)[0]).all()
    assert (alive >= floors[:3]).all()  # nothing up to margin * amax saturates
    assert (alive < 2 * floors[:3] * whole / floors.max()).all()  # and no head is further above its floor than an octave more than the layer is
    assert found[3] == 1.0
    assert scales.warnings == (f"{kind.upper()} of layer 0, row 3, was zero everywhere: scale 1.0",)
    assert len(set(np.frexp(layer.q)[0].tolist())) > 1  # Q chooses group by group


def test_readers_of_another_layers_cache_get_its_scales_and_a_q_of_their_own():
    statistics = planted(entries=[layer_entry(0), layer_entry(1), layer_entry(2, target=0)])
    target, other, reader = solve(statistics, PolicyOptions()).layers
    assert (reader.k.tolist(), reader.v.tolist()) == (target.k.tolist(), target.v.tolist())
    assert reader.q.tolist() == [alone(statistics.layers[2]["q"].counts)]
    assert other.k.tolist() == [alone(statistics.layers[1]["k"].counts)]


def test_latent_attention_has_one_scale_for_latent_and_rotary_key():
    statistics = planted(entries=[layer_entry(0, kv_heads=1, latent=True)])
    (layer,) = solve(statistics, PolicyOptions()).layers
    seen = statistics.layers[0]
    assert layer.k.tolist() == layer.v.tolist() == [alone(seen["k"].counts + seen["v"].counts)]


def test_what_was_zero_everywhere_gets_one_with_a_warning():
    statistics = planted()
    statistics.layers[1]["v"] = observed_of(np.zeros((2, 16, 8)))
    scales = solve(statistics, PolicyOptions())
    assert scales.layers[1].v.tolist() == [1.0]
    assert scales.warnings == ("V of layer 1, row 0, was zero everywhere: scale 1.0",)
    values = np.ones((2, 16, 8))
    values[1] = 0
    statistics.layers[1]["v"] = observed_of(values)
    per_head = solve(statistics, PolicyOptions(granularity="head"))
    assert per_head.layers[1].v[1] == 1.0
    assert per_head.warnings == ("V of layer 1, row 1, was zero everywhere: scale 1.0",)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("policy", POLICIES)
def test_counted_infinity_or_nan_is_refused_and_named(value, policy):
    statistics = planted()
    values = np.ones((2, 16, 8))
    values[1, 3, 3] = value
    torch_values = torch.from_numpy(values).to(torch.bfloat16)
    codes = torch_values.view(torch.int16).numpy().astype(np.int64) & 0x7FFF
    statistics.layers[1]["v"].counts[...] = np.stack([np.bincount(head.ravel(), minlength=32768) for head in codes])
    with pytest.raises(UsageError, match="V of layer 1 was infinite or NaN"):
        solve(statistics, PolicyOptions(policy=policy))


@pytest.mark.parametrize("size", [1e-38, 1e38])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_scale_that_no_kernel_can_use_is_refused_and_named(size, policy):
    statistics = planted()
    counts = statistics.layers[1]["k"].counts
    counts[...] = 0
    code = int(torch.tensor(size).to(torch.bfloat16).view(torch.int16)) & 0x7FFF
    counts[:, code] = 128
    with pytest.raises(UsageError, match="the k scale of layer 1 would be"):
        solve(statistics, PolicyOptions(policy=policy))


def test_scales_name_the_statistics_they_come_from():
    statistics = planted()
    scales = solve(statistics, PolicyOptions())
    assert scales.statistics_digest == statistics.digest()
    assert (scales.counted, scales.provenance) == (statistics.counted, statistics.provenance)


@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_saved_file_loads_to_the_same_scales_and_the_same_bytes(tmp_path, granularity):
    scales = solve(planted(), PolicyOptions(granularity=granularity))
    scales.save(tmp_path / "a.safetensors")
    loaded = Scales.load(tmp_path / "a.safetensors")
    assert loaded.digest() == scales.digest()
    assert loaded.options == scales.options
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf"), [1.0, 2.0]])
def test_a_scales_file_with_a_scale_that_engines_would_load_in_silence_is_refused(tmp_path, wrong):
    scales = solve(planted(), PolicyOptions())
    tensors = scales._tensors() | {"layers.1.v_scale": np.atleast_1d(np.array(wrong, dtype=np.float32))}
    write_tensors(tmp_path / "s.safetensors", tensors, scales._header())
    with pytest.raises(UsageError, match="the v scale of layer 1 is not 1 positive float32"):
        Scales.load(tmp_path / "s.safetensors")


@pytest.mark.parametrize(
    ("key", "value"), [("options", {"policy": "none"}), ("options", None), ("layout", {}), ("provenance", 3), ("warnings", None)]
)
def test_a_damaged_scales_file_is_one_line(tmp_path, key, value):
    scales = solve(planted(), PolicyOptions())
    write_tensors(tmp_path / "s.safetensors", scales._tensors(), {**scales._header(), key: value})
    with pytest.raises(UsageError, match="is damaged") as caught:
        Scales.load(tmp_path / "s.safetensors")
    assert "\n" not in str(caught.value)


def test_solving_from_a_file_is_solving_from_memory(tmp_path):
    statistics = planted()
    statistics.save(tmp_path / "s.safetensors")
    assert solve(Statistics.load(tmp_path / "s.safetensors"), PolicyOptions()).digest() == solve(statistics, PolicyOptions()).digest()
