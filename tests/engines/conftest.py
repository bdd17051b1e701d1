import pytest

from .tiny import tiny_llama


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A tiny bf16 Llama without scales: 3 layers, 4 query heads, 2 KV heads of 32."""
    return tiny_llama(tmp_path_factory.mktemp("llama"))
