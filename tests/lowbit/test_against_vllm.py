"""The same constants as vLLM's own code: its INT4 transform, TurboQuant's levels and slot sizes, taken from the installed package."""

import pytest
import torch

from calibrate.engines.host import vllm_distribution
from calibrate.errors import HostError
from calibrate.lowbit import make_format
from calibrate.lowbit.integer import transform
from calibrate.lowbit.lloydmax import lloyd_max


@pytest.fixture(scope="module", autouse=True)
def _vllm():
    try:
        vllm_distribution()
    except HostError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_int4_transform(dim):
    ops = pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head")
    x = torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(0))
    theirs = ops.single_rht(x)
    assert torch.allclose(transform(x), theirs, atol=1e-4)
    assert torch.allclose(transform(theirs, inverse=True), ops.single_rht(theirs, inverse=True) / (dim & -dim), atol=1e-4)


@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_levels(bits):
    centroids = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.centroids")
    theirs = centroids.get_centroids(128, bits)
    assert torch.allclose((lloyd_max(bits) / 128**0.5).float(), theirs, rtol=2e-3, atol=1e-6)  # theirs integrates by trapezoids


@pytest.mark.parametrize("preset", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_turboquant_slots(preset, dim):
    config = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.config")
    assert make_format(preset).token_bytes(1, dim, dim) == config.TurboQuantConfig.from_cache_dtype(preset, dim).slot_size_aligned
