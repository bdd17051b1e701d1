import pytest

from tests.engines.conftest import vllm_missing


def pytest_collection_modifyitems(items):
    reason = vllm_missing()
    for item in items:
        if reason and item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.skip(reason=reason))
