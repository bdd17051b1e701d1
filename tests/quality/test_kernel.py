"""The quality harness on real vLLM: its fast scores are vLLM's own, and scales and weights set in place are those of a checkpoint that has them."""

import multiprocessing
import shutil

import numpy as np
import pytest
import torch

from benchmarks.quality.kernel import fitted
from benchmarks.quality.scoring import Reference, beside, first, groups, rows_of
from calibrate.errors import CheckFailed, UsageError
from tests.engines.tiny import calibrated
from tests.tiny import tiny_checkpoint

from . import engines


def run(target, *arguments) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(600)
    assert process.exitcode == 0


def tensors_of(name: str) -> dict[str, np.ndarray]:
    return {f"{layer.module}.{kind}_scale": scale for layer in engines.scales_of(engines.VALUES[name]).layers for kind, scale in layer.items()}


@pytest.fixture(scope="module")
def sixteen_bit(tmp_path_factory):
    """(checkpoint, folder with reference.npz and again.npz)."""
    folder = tmp_path_factory.mktemp("quality")
    source = tiny_checkpoint(folder / "model")
    run(engines.sixteen_bit, source, folder)
    return source, folder


@pytest.mark.vllm
def test_fast_scores_are_those_of_vllm(sixteen_bit):
    """vLLM rounds its logits to bfloat16 before the softmax; here they are kept in fp32, and nothing else differs."""
    reference, again = Reference.load(sixteen_bit[1] / "reference.npz"), np.load(sixteen_bit[1] / "again.npz")
    assert reference.lengths.tolist() == list(engines.LENGTHS)
    assert len(reference.logprob) == sum(engines.LENGTHS) - len(engines.LENGTHS)
    np.testing.assert_allclose(again["rounded"], again["theirs"], atol=1e-5, rtol=0)
    assert 0 < np.abs(reference.logprob - again["theirs"]).max() < 0.05
    np.testing.assert_array_equal(again["logprob"], reference.logprob)
    np.testing.assert_array_equal(again["top1"], reference.top_ids[:, 0])
    assert np.abs(again["kl"]).max() < 1e-6


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_scales_and_weights_set_in_place_are_those_of_a_checkpoint_that_has_them(sixteen_bit, tmp_path):
    source, folder = sixteen_bit
    reference = folder / "reference.npz"
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    begun = calibrated(source, tmp_path / "begun", tensors_of("first"), "tensor")
    run(engines.in_place, begun, other / "model.safetensors", reference, tmp_path / "in_place.npz")
    found = np.load(tmp_path / "in_place.npz")

    second = calibrated(source, tmp_path / "second", tensors_of("second"), "tensor")
    run(engines.fresh, second, reference, tmp_path / "second.npz")
    blend = shutil.copytree(source, tmp_path / "blend")
    engines.mixed(source / "model.safetensors", other / "model.safetensors", blend / "model.safetensors")
    run(engines.fresh, calibrated(blend, tmp_path / "blended", tensors_of("second"), "tensor"), reference, tmp_path / "blended.npz")

    for field in ("logprob", "kl", "top1"):
        np.testing.assert_array_equal(found[f"second-{field}"], np.load(tmp_path / "second.npz")[field])
        np.testing.assert_array_equal(found[f"weights-{field}"], np.load(tmp_path / "blended.npz")[field])
        np.testing.assert_array_equal(found[f"own-{field}"], found[f"first-{field}"])
        np.testing.assert_array_equal(found[f"second-{field}"], found[f"by layer-{field}"])
        np.testing.assert_array_equal(found[f"second-{field}"], found[f"restored-{field}"])
    for name in ("first", "weights"):
        assert np.abs(found[f"{name}-logprob"] - found["second-logprob"]).mean() > 0.01


def test_kl_over_named_tokens_and_one_rest_is_just_below_the_whole():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(50, 300, generator=generator)
    other = logits + 0.3 * torch.randn(50, 300, generator=generator)
    own = torch.randint(0, 300, (50,), generator=generator)
    whole = engines.whole_kl(logits, other)
    logprob, ids, top, rest = (torch.from_numpy(column) for column in first(logits.clone(), own))
    assert torch.allclose(logprob, logits.log_softmax(-1).gather(1, own[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(top.exp().sum(-1) + rest.exp(), torch.ones(50), atol=1e-5)
    theirs, kl, top1 = beside(other.clone(), own, ids, top, rest)
    assert torch.allclose(theirs, other.log_softmax(-1).gather(1, own[:, None])[:, 0], atol=1e-5)
    assert (top1 == other.argmax(-1)).all()
    assert (kl <= whole + 1e-5).all()
    assert float(kl.mean()) > 0.9 * float(whole.mean())


def test_scales_fit_the_engines_buffers():
    assert fitted(np.float32([2]), 3, 3).tolist() == [2, 2, 2]
    assert fitted(np.float32([1, 2, 3]), 3, 3).tolist() == [1, 2, 3]
    assert fitted(np.float32([1, 5, 3, 2]), 2, 2).tolist() == [5, 3]
    assert fitted(np.float32([1, 5]), 1, 1).tolist() == [5]
    with pytest.raises(UsageError, match="loaded per tensor"):
        fitted(np.float32([1, 2]), 1, 2)


def test_rows_are_found_by_their_tokens_whatever_their_order_and_padding():
    rows = [np.array(row) for row in ([5, 6, 7], [8, 9], [5, 6, 7], [5, 6])]
    order = [1, 3, 0, 2]
    ids = torch.tensor([token for number in order for token in rows[number]] + [0, 0])
    positions = torch.tensor([place for number in order for place in range(len(rows[number]))] + [0, 0])
    hidden = torch.arange(len(ids))[:, None]
    assert [part[:, 0].tolist() for part in rows_of([(ids, positions, hidden)], rows)] == [[4, 5], [0], [7, 8], [2]]
    with pytest.raises(CheckFailed, match="1 of 4 rows in pieces"):
        rows_of([(ids[:7], positions[:7], hidden[:7])], rows)


def test_steps_hold_whole_rows():
    rows = [np.zeros(length, np.int32) for length in (4, 4, 3, 9, 2)]
    assert [[len(row) for row in group] for group in groups(rows, 8)] == [[4, 4], [3], [9], [2]]
