import pytest

from calibrate.engines.host import vllm_distribution
from calibrate.errors import HostError

from .tiny import tiny_llama


def vllm_missing() -> str:
    """Why the tests that start vLLM cannot run here, "" when they can."""
    try:
        vllm_distribution()
    except HostError as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items):
    reason = vllm_missing()
    for item in items:
        if reason and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny bf16 Llama without scales: 3 layers, 4 query heads, 2 KV heads of 32."""
    return tiny_llama(tmp_path_factory.mktemp("llama"))
