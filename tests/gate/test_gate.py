"""A gate that passes, and every kind of failure: alone, and with its reason."""

import json
import shutil

import numpy as np
import pytest

from calibrate.artefact import write_json
from calibrate.evaluate.results import FOLDER, CompareResult, NeedleResult, ReasoningResult, load, save
from calibrate.gate import RULES, Policy, evaluate_gate, load_policy
from calibrate.scales import Scales
from tests.gate.evidence import (
    ENGINE,
    PROVENANCE,
    add_evidence,
    around,
    calibrated,
    cells_of,
    change,
    compare_of,
    edit_scales,
    fidelity_of,
    held_out_of,
    installed_vllm,
    needles_of,
    readback_of,
    reasoning_of,
    redigest,
    weight_file,
    with_fidelity,
)
from tests.tiny import tiny_checkpoint

DEFAULT = Policy(accept_versions=(installed_vllm(),))
COMPARE = {"held_out_saturation", "kl", "perplexity", "top1", "not_worse_than_unit", "not_worse_than_random"}
FIRST_K = "model.layers.0.self_attn.k_scale"


def outcome(checkpoint, policy=DEFAULT):
    """Names that fail, names that lack evidence, and name → reason."""
    verdict = evaluate_gate(checkpoint, policy)
    assert [check.name for check in verdict.checks] == list(RULES)
    by_status = {status: {check.name for check in verdict.checks if check.status == status} for status in ("fail", "missing")}
    assert verdict.passed == (not by_status["fail"] and not by_status["missing"])
    return by_status["fail"], by_status["missing"], {check.name: check.reason for check in verdict.checks}


def fails_alone(checkpoint, name, *words, policy=DEFAULT):
    failed, missing, reasons = outcome(checkpoint, policy)
    assert (failed, missing) == ({name}, set()), {one: reasons[one] for one in failed | missing}
    for word in words:
        assert word in reasons[name]


def test_everything_in_order_passes(passing):
    verdict = evaluate_gate(passing, DEFAULT)
    assert verdict.passed, verdict.stopping
    assert {check.name for check in verdict.checks if check.status == "waived"} == {"reasoning"}
    assert all(check.reason for check in verdict.checks)
    reasons = {check.name: check.reason for check in verdict.checks}
    assert "all 3 attention layers" in reasons["coverage"]
    assert "all 9 scales" in reasons["scales_agree"]


def test_per_head_scales_and_several_shards_pass(tmp_path):
    source = tiny_checkpoint(tmp_path / "source", "qwen3", shard="100KB")
    assert outcome(add_evidence(calibrated(source, tmp_path / "out", granularity="head")))[:2] == (set(), set())


def test_kv_shared_readers_must_hold_their_targets_scales(tmp_path):
    out = add_evidence(calibrated(tiny_checkpoint(tmp_path / "source", "gemma3n_text"), tmp_path / "out"))
    failed, missing, reasons = outcome(out)
    assert (failed, missing) == (set(), set())
    assert "2 of them reading another's cache" in reasons["coverage"]
    edit_scales(out, lambda tensors: tensors.update({name: array * 2 for name, array in tensors.items() if ".5." in name}), touch_digest=True)
    failed, _, reasons = outcome(out)
    assert "coverage" in failed
    assert "read another's cache differ" in reasons["coverage"]


# --- tampering


@pytest.mark.parametrize("touch_digest", [False, True])
def test_a_scale_edited_in_the_engines_file(checkpoint, touch_digest):
    edit_scales(checkpoint, lambda tensors: tensors.update({FIRST_K: tensors[FIRST_K] * 2}), touch_digest=touch_digest)
    failed, missing, reasons = outcome(checkpoint)
    assert failed == {"scales_agree", "evidence_subject"} | (set() if touch_digest else {"provenance_files"})
    assert missing == {"readback", "needle_recall", *COMPARE}
    assert f"1 of 9 scales in kv_scales.safetensors are not the solved ones: {FIRST_K}" in reasons["scales_agree"]
    assert "kv scales sha256 differ" in reasons["evidence_subject"]
    if not touch_digest:
        assert "kv_scales.safetensors" in reasons["provenance_files"]


def test_a_scale_edited_alone_fails_alone_when_the_evidence_is_made_again(checkpoint):
    edit_scales(checkpoint, lambda tensors: tensors.update({FIRST_K: tensors[FIRST_K] * 2}), touch_digest=True)
    fails_alone(add_evidence(checkpoint), "scales_agree", FIRST_K, "instead of")


@pytest.mark.parametrize("touch_digest", [False, True])
def test_a_scale_edited_consistently_in_both_files(checkpoint, touch_digest):
    """Both files agree with each other; the digest of the solved scales, and the evidence, do not agree with them."""
    file = checkpoint / "kv_calibration/scales.safetensors"
    scales = Scales.load(file)
    scales.layers[0].k[:] *= 2
    scales.save(file)
    names = ["kv_calibration/scales.safetensors"] if touch_digest else []
    edit_scales(checkpoint, lambda tensors: tensors.update({FIRST_K: tensors[FIRST_K] * 2}), touch_digest=touch_digest)
    redigest(checkpoint, *names)
    failed, _, reasons = outcome(checkpoint)
    assert failed == {"scales_agree", "evidence_subject"} | (set() if touch_digest else {"provenance_files"})
    assert "another digest than provenance.json records" in reasons["scales_agree"]


def test_a_scale_edited_with_every_digest_forged_is_caught_by_the_evidence(checkpoint):
    file = checkpoint / "kv_calibration/scales.safetensors"
    scales = Scales.load(file)
    scales.layers[0].k[:] *= 2
    scales.save(file)
    edit_scales(checkpoint, lambda tensors: tensors.update({FIRST_K: tensors[FIRST_K] * 2}), touch_digest=True)
    redigest(checkpoint, "kv_calibration/scales.safetensors")
    write_json(checkpoint / PROVENANCE, json.loads((checkpoint / PROVENANCE).read_text()) | {"scales": scales.digest()})
    assert outcome(checkpoint)[0] == {"evidence_subject"}


def test_a_weight_shard_swapped_under_an_identical_header(checkpoint):
    shard = weight_file(checkpoint)
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    tensor = next(entry for name, entry in header.items() if "embed_tokens" in name)  # 32 KiB: the fingerprint looks at the middle 4
    content[start + tensor["data_offsets"][0]] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    fails_alone(checkpoint, "provenance_weights", "1 of 1 weight files are not those that were calibrated")


def test_config_edited(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").unlink()
    write_json(checkpoint / "config.json", config | {"rope_theta": 1.0})
    fails_alone(checkpoint, "provenance_files", "config.json")


def test_the_model_card_may_be_completed(checkpoint):
    (checkpoint / "README.md").unlink()
    (checkpoint / "README.md").write_text("# Ours\n")
    assert evaluate_gate(checkpoint, DEFAULT).passed


def test_a_file_removed(checkpoint):
    (checkpoint / "kv_calibration/statistics.safetensors").unlink()
    failed, missing, reasons = outcome(checkpoint)
    assert missing == {"statistics"}
    assert failed <= {"provenance_files"}
    assert "no such file" in reasons["statistics"]


def test_statistics_of_another_run(checkpoint, llama, tmp_path):
    from calibrate.collect import collect
    from tests.conftest import collect_run, rows_corpus

    file = checkpoint / "kv_calibration/statistics.safetensors"
    collect(collect_run(llama, rows_corpus([40, 10], seed=9))).save(file)
    if file.relative_to(checkpoint).as_posix() in json.loads((checkpoint / PROVENANCE).read_text())["files"]:
        redigest(checkpoint, "kv_calibration/statistics.safetensors")
    fails_alone(checkpoint, "statistics", "not what the scales were solved from")


@pytest.mark.parametrize(("value", "word"), [(np.nan, "nan"), (0.0, "is 0"), (-0.5, "-0.5"), (np.inf, "inf")])
def test_a_scale_that_engines_load_in_silence(checkpoint, value, word):
    edit_scales(checkpoint, lambda tensors: tensors.update({FIRST_K: np.array([value], np.float32)}), touch_digest=True)
    failed, missing, reasons = outcome(add_evidence(checkpoint))
    assert failed - {"readback"} == {"finite_positive", "scales_agree"}  # a NaN's read-back row equals nothing
    assert missing == set()
    assert word in reasons["finite_positive"]
    assert FIRST_K in reasons["finite_positive"]


def test_scales_stored_as_another_type(checkpoint):
    import torch
    from safetensors.torch import load_file, save_file

    path = checkpoint / "kv_scales.safetensors"
    tensors = load_file(path)
    path.unlink()
    save_file({name: tensor.to(torch.bfloat16).clone() for name, tensor in tensors.items()}, path)
    failed, _, reasons = outcome(checkpoint)
    assert failed - {"scales_agree"} == {"finite_positive", "provenance_files", "evidence_subject"}  # bf16 may happen to hold a scale exactly
    assert "9 scales are not float32" in reasons["finite_positive"]


def test_a_layer_removed(checkpoint):
    edit_scales(checkpoint, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1." in name], touch_digest=True)
    fails_alone(add_evidence(checkpoint), "coverage", "3 of 9 scales are not in kv_scales.safetensors: model.layers.1.self_attn.k_scale")


def test_a_scale_of_no_layer(checkpoint):
    edit_scales(checkpoint, lambda tensors: tensors.update({"model.layers.9.self_attn.k_scale": np.ones(1, np.float32)}), touch_digest=True)
    fails_alone(add_evidence(checkpoint), "coverage", "1 scales of no attention layer")


def test_the_engines_file_gone_or_damaged(checkpoint):
    (checkpoint / "kv_scales.safetensors").write_bytes(b"no tensors")
    failed, _, reasons = outcome(checkpoint)
    assert {"coverage", "finite_positive", "provenance_files", "scales_agree"} <= failed
    (checkpoint / "kv_scales.safetensors").unlink()
    failed, _, reasons = outcome(checkpoint)
    assert {"coverage", "finite_positive", "provenance_files", "scales_agree", "evidence_subject"} <= failed
    assert "no kv_scales.safetensors" in reasons["coverage"]


def test_a_truncated_shard(checkpoint):
    shard = weight_file(checkpoint)
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:-10])
    failed, _, reasons = outcome(checkpoint)
    assert {"provenance_weights", "evidence_subject"} <= failed
    assert "truncated" in reasons["provenance_weights"]


# --- evidence


def test_results_of_another_checkpoint(checkpoint, llama, tmp_path):
    other = add_evidence(calibrated(llama, tmp_path / "other", policy="amax", margin=2.0))
    shutil.copy(other / FOLDER / "compare-transformers.json", checkpoint / FOLDER)
    failed, missing, reasons = outcome(checkpoint)
    assert failed == {"evidence_subject"}
    assert missing == COMPARE
    assert "compare-transformers.json is about another checkpoint (scales digest, kv scales sha256 differ)" in reasons["evidence_subject"]


def test_evidence_of_another_engine_version(checkpoint):
    older = ENGINE.model_copy(update={"version": "transformers 4.1.0"})
    save(compare_of(checkpoint, older), checkpoint / FOLDER / "compare-transformers.json")
    fails_alone(checkpoint, "evidence_engine", "compare-transformers.json was made by transformers 4.1.0")
    assert evaluate_gate(checkpoint, Policy(accept_versions=(installed_vllm(), "transformers 4.1.0"))).passed


def test_readback_of_another_engine_version(checkpoint):
    save(readback_of(checkpoint, engine="vllm 0.1.0"), checkpoint / FOLDER / "readback.json")
    fails_alone(checkpoint, "evidence_engine", "readback.json was made by vllm 0.1.0")


def test_a_result_filed_under_another_engine(checkpoint):
    shutil.move(checkpoint / FOLDER / "niah-transformers.json", checkpoint / FOLDER / "niah-vllm.json")
    fails_alone(checkpoint, "evidence_engine", "transformers in a file named for vllm")


@pytest.mark.parametrize(
    ("file", "needing", "command"),
    [
        ("readback.json", {"readback"}, "kv-calibrate verify"),
        ("compare-transformers.json", COMPARE, "kv-calibrate compare"),
        ("niah-transformers.json", {"needle_recall"}, "kv-calibrate niah"),
    ],
)
def test_missing_evidence(checkpoint, file, needing, command):
    (checkpoint / FOLDER / file).unlink()
    failed, missing, reasons = outcome(checkpoint)
    assert failed == set()
    assert missing == {"evidence_complete", *needing}
    assert command in reasons["evidence_complete"]
    assert all(command in reasons[name] for name in needing)


def test_no_evidence_at_all(checkpoint):
    shutil.rmtree(checkpoint / FOLDER)
    failed, missing, _ = outcome(checkpoint)
    assert failed == set()
    assert missing == {"evidence_complete", "evidence_subject", "evidence_engine", "readback", "needle_recall", *COMPARE}


def test_damaged_evidence(checkpoint):
    (checkpoint / FOLDER / "niah-transformers.json").write_text("{")
    failed, missing, reasons = outcome(checkpoint)
    assert (failed, missing) == (set(), {"evidence_complete", "needle_recall"})
    assert "is not a NeedleResult" in reasons["needle_recall"]


def test_vllm_results_asked_for(checkpoint):
    failed, missing, reasons = outcome(checkpoint, DEFAULT.model_copy(update={"engine": "vllm"}))
    assert (failed, missing) == (set(), {"evidence_complete", "needle_recall", *COMPARE})
    assert "no compare-vllm.json" in reasons["kl"]


# --- read-back


def _readback(checkpoint, edit):
    result = readback_of(checkpoint, ranks=2)
    edit(result.readback)
    save(result, checkpoint / FOLDER / "readback.json")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda said: said["rows"][4].update(ok=False, loaded=[1.0], reason="not loaded (stayed 1.0)"), ["1 of 18 scales", "stayed 1.0"]),
        (lambda said: said["rows"][4].update(loaded=[1.0]), ["1 of 18 scales", "loaded and expected differ"]),
        (lambda said: said.update(rows=[row for row in said["rows"] if row["rank"] == 0]), ["1 of 2 tensor-parallel ranks"]),
        (lambda said: said["rows"].pop(), ["8 of 9 scales on rank 1"]),
        (lambda said: said.update(rows=[]), ["compared nothing"]),
        (lambda said: said.update(error="k_scale must be positive"), ["k_scale must be positive"]),
    ],
)
def test_readback_not_exact(checkpoint, edit, words):
    _readback(checkpoint, lambda said: None)
    assert evaluate_gate(checkpoint, DEFAULT).passed
    _readback(checkpoint, edit)
    fails_alone(checkpoint, "readback", *words)


# --- figures


def test_saturation_above_the_bound(checkpoint):
    held_out = (*compare_of(checkpoint).held_out, held_out_of("calibrated", 2, "v", saturated=0.01))
    change(checkpoint, CompareResult, "compare-transformers.json", held_out=held_out)
    fails_alone(checkpoint, "held_out_saturation", "0.01 of V of layer 2 saturates")


def test_saturation_of_another_variant_is_not_ours(checkpoint):
    held_out = (*compare_of(checkpoint).held_out, held_out_of("unit", 2, "v", saturated=0.5))
    change(checkpoint, CompareResult, "compare-transformers.json", held_out=held_out)
    assert evaluate_gate(checkpoint, DEFAULT).passed


@pytest.mark.parametrize(
    ("fields", "name", "words"),
    [
        ({"kl_mean": around(0.029)}, "kl", ["0.029", "at most 0.032"]),
        ({"perplexity_ratio": around(1.024, 0.01)}, "perplexity", ["1.0240", "1.0342"]),
        ({"top1_agreement": around(0.93, 0.05)}, "top1", ["93.00%", "88.35%"]),
    ],
)
def test_the_worse_end_of_an_interval_is_what_counts(checkpoint, fields, name, words):
    with_fidelity(checkpoint, "calibrated", **fields)
    fails_alone(checkpoint, name, *words)


@pytest.mark.parametrize(
    ("baseline", "rule", "name"), [("unit", "not_worse_than_unit", "scale 1.0"), ("random", "not_worse_than_random", "random-token")]
)
def test_worse_than_a_cheaper_level(checkpoint, baseline, rule, name):
    with_fidelity(checkpoint, "calibrated", documents=fidelity_of("calibrated", 0.012).documents)
    others = {"unit": "random", "random": "unit"}
    with_fidelity(checkpoint, others[baseline], documents=fidelity_of(others[baseline], 0.012).documents)
    fails_alone(checkpoint, rule, f"calibrated is worse than {name}", "KL +0.00")


def test_a_difference_within_noise_or_tolerance_is_no_failure(checkpoint):
    with_fidelity(checkpoint, "unit", documents=fidelity_of("unit", 0.0035).documents)
    with_fidelity(checkpoint, "random", documents=fidelity_of("random", 0.0021).documents)
    assert evaluate_gate(checkpoint, DEFAULT).passed


def test_baselines_must_be_paired(checkpoint):
    with_fidelity(checkpoint, "unit", documents=fidelity_of("unit", 0.006).documents[1:])
    fails_alone(checkpoint, "not_worse_than_unit", "not scored on the same documents")
    with_fidelity(checkpoint, "unit", documents=fidelity_of("unit", 0.006).documents, engine=ENGINE.model_copy(update={"compute_dtype": "float32"}))
    fails_alone(checkpoint, "not_worse_than_unit", "different engines or settings")


def test_a_baseline_that_was_not_run(checkpoint):
    result = load(CompareResult, checkpoint / FOLDER / "compare-transformers.json")
    change(checkpoint, CompareResult, "compare-transformers.json", fidelity=tuple(one for one in result.fidelity if one.variant != "random"))
    failed, missing, reasons = outcome(checkpoint)
    assert (failed, missing) == (set(), {"not_worse_than_random"})
    assert "no figures of random-token scales" in reasons["not_worse_than_random"]


def test_too_few_documents(checkpoint):
    for variant in ("unit", "random", "calibrated"):
        with_fidelity(checkpoint, variant, documents=fidelity_of(variant, 0.004).documents[:3])
    failed, missing, reasons = outcome(checkpoint)
    assert (failed, missing) == ({"kl", "perplexity", "top1"}, set())
    assert "only 3 documents" in reasons["kl"]


# --- needles and reasoning


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"calibrated": cells_of(lambda length, depth, seed: length < 512)}, ["20 of 30", "10 lost", "drop is above", "beyond noise"]),
        ({"calibrated": cells_of(lambda length, depth, seed: (length, depth) != (512, 0.5))}, ["drop 6.7%", "drop is above its bound"]),
        ({"16-bit": cells_of(seeds=1), "calibrated": cells_of(seeds=1)}, ["only 15 needle cells"]),
        ({"16-bit": cells_of(lambda *_: False), "calibrated": cells_of(lambda *_: False)}, ["16-bit cache itself got only 0 of 30"]),
        ({"calibrated": cells_of(seeds=3)}, ["not asked the same needle cells"]),
    ],
)
def test_needle_recall(checkpoint, cells, words):
    save(needles_of(checkpoint, **cells), checkpoint / FOLDER / "niah-transformers.json")
    fails_alone(checkpoint, "needle_recall", *words)


def test_a_significant_loss_fails_even_below_the_bound(checkpoint):
    lost = {(512, 0.0), (512, 0.25), (512, 0.5), (512, 0.75), (512, 1.0)}
    cells = {"16-bit": cells_of(seeds=40), "calibrated": cells_of(lambda length, depth, seed: (length, depth) not in lost or seed > 3, seeds=40)}
    save(needles_of(checkpoint, **cells), checkpoint / FOLDER / "niah-transformers.json")
    fails_alone(checkpoint, "needle_recall", "20 lost and 0 won", "beyond noise")


def test_needles_without_the_calibrated_cache(checkpoint):
    result = load(NeedleResult, checkpoint / FOLDER / "niah-transformers.json")
    change(checkpoint, NeedleResult, "niah-transformers.json", variants=result.variants[:2])
    failed, missing, reasons = outcome(checkpoint)
    assert (failed, missing) == (set(), {"needle_recall"})
    assert "no answers with the calibrated cache" in reasons["needle_recall"]


def test_reasoning_is_judged_where_the_policy_asks(checkpoint):
    asked = DEFAULT.model_copy(update={"reasoning": DEFAULT.reasoning.model_copy(update={"required": True})})
    assert evaluate_gate(checkpoint, asked).passed
    save(reasoning_of(checkpoint, right=12), checkpoint / FOLDER / "reasoning-transformers.json")
    fails_alone(checkpoint, "reasoning", "12 of 24 reasoning problems right", policy=asked)
    assert load(ReasoningResult, checkpoint / FOLDER / "reasoning-transformers.json").variants[1].variant == "calibrated"
    assert evaluate_gate(checkpoint, DEFAULT).passed
    (checkpoint / FOLDER / "reasoning-transformers.json").unlink()
    assert outcome(checkpoint, asked)[1] == {"evidence_complete", "reasoning"}


# --- waivers


@pytest.mark.parametrize("name", RULES)
def test_every_rule_can_be_waived_and_says_so(checkpoint, name):
    verdict = evaluate_gate(checkpoint, DEFAULT.model_copy(update={"waive": {name: "not for this model"}}))
    check = next(check for check in verdict.checks if check.name == name)
    assert (check.status, check.reason) == ("waived", "switched off by the policy: not for this model")


def test_a_waiver_lifts_only_its_rule(checkpoint):
    with_fidelity(checkpoint, "calibrated", kl_mean=around(1.0), perplexity_ratio=around(3.0))
    fails_alone(checkpoint, "perplexity", policy=DEFAULT.model_copy(update={"waive": {"kl": "known"}}))


def test_the_shipped_policy_is_the_documented_default():
    shipped = load_policy()
    assert shipped.model_dump(exclude={"description"}) == Policy().model_dump(exclude={"description"})
