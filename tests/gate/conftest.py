"""One calibrated checkpoint with evidence for the session; tests that spoil it take a copy."""

import shutil

import pytest

from tests.gate.evidence import add_evidence, calibrated


@pytest.fixture(scope="session")
def passing(llama, tmp_path_factory):
    """Read only."""
    return add_evidence(calibrated(llama, tmp_path_factory.mktemp("gate") / "calibrated"))


@pytest.fixture
def checkpoint(passing, tmp_path):
    """A copy whose files are its own."""
    return shutil.copytree(passing, tmp_path / "copy")
