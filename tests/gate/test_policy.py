"""Policies: the shipped one, a user's, and what is refused."""

import pytest

from calibrate.errors import UsageError
from calibrate.gate import load_policy


def _policy(tmp_path, text):
    path = tmp_path / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_keys_left_out_are_the_defaults(tmp_path):
    policy = load_policy(_policy(tmp_path, "engine: vllm\nfidelity: {kl_mean: 0.5}\nwaive: {top1: base model}\n"))
    assert (policy.engines, policy.fidelity.kl_mean, policy.fidelity.min_documents) == (("vllm",), 0.5, 8)
    assert load_policy(_policy(tmp_path, "")) == load_policy(_policy(tmp_path, "{}"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kl: 0.5", ["kl", "Extra inputs"]),
        ("fidelity: {kl: 0.5}", ["fidelity.kl", "Extra inputs"]),
        ("fidelity: {kl_mean: lots}", ["fidelity.kl_mean"]),
        ("needles: {max_drop: 2}", ["needles.max_drop"]),
        ("engine: sglang", ["engine"]),
        ("waive: {coverag: because}", ["waive", "no rule coverag"]),
        ("waive: {coverage: ' '}", ["waive", "say why coverage is waived"]),
        ("waive: [coverage]", ["waive"]),
        ("- a list", ["the file"]),
        ("fidelity: [", ["not YAML"]),
    ],
)
def test_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(UsageError) as refused:
        load_policy(_policy(tmp_path, text))
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in ["policy.yaml", *words])


def test_no_such_policy(tmp_path):
    with pytest.raises(UsageError, match="cannot read policy"):
        load_policy(tmp_path / "none.yaml")
