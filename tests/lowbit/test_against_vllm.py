"""The same constants as vLLM's own code: its INT4 transform, TurboQuant's levels and slot sizes. Its kernels: test_vllm_kernels.py."""

import pytest
import torch

from calibrate.engines.host import vllm_distribution
from calibrate.errors import HostError
from calibrate.lowbit import make_format
from calibrate.lowbit.integer import transform
from calibrate.lowbit.lloydmax import lloyd_max
from calibrate.lowbit.turboquant import _levels


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


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [3, 4])
def test_turboquant_levels(bits, dim):
    centroids = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.centroids")
    ours = _levels(bits, dim, torch.device("cpu"))
    assert torch.equal(ours, centroids.get_centroids(dim, bits))
    assert torch.allclose(ours, (lloyd_max(bits) / dim**0.5).float(), rtol=8e-4, atol=0)


@pytest.mark.parametrize("preset", ["turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_turboquant_slots(preset, dim):
    config = pytest.importorskip("vllm.model_executor.layers.quantization.turboquant.config")
    assert make_format(preset).token_bytes(1, dim, dim) == config.TurboQuantConfig.from_cache_dtype(preset, dim).slot_size_aligned
