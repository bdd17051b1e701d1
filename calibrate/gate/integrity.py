"""Rules about the checkpoint itself: are all scales there, sane, and those that were calibrated for exactly these weights."""

from collections import Counter

import numpy as np

from calibrate.artefact import sha256_file
from calibrate.engines.names import KINDS
from calibrate.gate.material import Material
from calibrate.gate.policy import Policy
from calibrate.gate.verdict import Outcome, judged
from calibrate.model.source import SCALES_FILE

_MOST = 3
EDITABLE = {"README.md"}  # the model card is for people to complete


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def coverage(material: Material, policy: Policy) -> Outcome:
    """Every attention layer of the layout has k, v and q; a KV-shared reader has its target's k and v."""
    if material.expected.value is None or material.tensors.value is None:
        return Outcome("fail", f"the scales cannot be held against the layout: {material.tensors.fault or material.expected.fault}")
    expected, stored = material.expected.value, material.tensors.value
    absent = sorted(set(expected) - set(stored))
    strange = sorted(set(stored) - set(expected))
    if absent:
        return Outcome("fail", f"{len(absent)} of {len(expected)} scales are not in {SCALES_FILE}: {_some(absent)}")
    if strange:
        return Outcome("fail", f"{SCALES_FILE} holds {len(strange)} scales of no attention layer: {_some(strange)}")
    wrong = [f"{name} ({stored[name][1].size} of {values.size})" for name, values in expected.items() if stored[name][1].size != values.size]
    if wrong:
        return Outcome("fail", f"{len(wrong)} scales have another number of values than their layer needs: {_some(wrong)}")
    return _shared(material)


def _shared(material: Material) -> Outcome:
    """Expected names come layer by layer, k, v and q of each."""
    layers = material.scales.value.layout["layers"]
    names = list(material.expected.value)
    prefixes = {layer["index"]: names[len(KINDS) * place].removesuffix(".k_scale") for place, layer in enumerate(layers)}
    stored = material.tensors.value
    readers = [layer for layer in layers if layer["target"] != layer["index"]]
    differ = [
        f"{prefixes[layer['index']]}.{kind}_scale"
        for layer in readers
        for kind in ("k", "v")
        if not np.array_equal(stored[f"{prefixes[layer['index']]}.{kind}_scale"][1], stored[f"{prefixes[layer['target']]}.{kind}_scale"][1])
    ]
    if differ:
        return Outcome("fail", f"{len(differ)} scales of layers that read another's cache differ from that layer's: {_some(differ)}")
    shared = f", {len(readers)} of them reading another's cache with its scales" if readers else ""
    return Outcome("pass", f"k, v and q scales of all {len(layers)} attention layers are there{shared}")


def finite_positive(material: Material, policy: Policy) -> Outcome:
    """Stored as float32, finite, above zero; engines load anything else in silence."""
    if material.tensors.value is None:
        return Outcome("fail", f"there are no scales to look at: {material.tensors.fault}")
    stored = material.tensors.value
    types = [f"{name} ({dtype})" for name, (dtype, _) in stored.items() if dtype != "F32"]
    if types:
        return Outcome("fail", f"{len(types)} scales are not float32: {_some(types)}")
    bad = [f"{name} is {values[~_usable(values)][0]:g}" for name, (_, values) in stored.items() if not _usable(values).all()]
    if bad:
        return Outcome("fail", f"{len(bad)} of {len(stored)} scales cannot be used: {_some(bad)}")
    every = np.concatenate([values for _, values in stored.values()]) if stored else np.zeros(0)
    if not every.size:
        return Outcome("fail", f"{SCALES_FILE} holds no scale")
    return Outcome("pass", f"all {every.size} scale values are finite and positive, from {every.min():.4g} to {every.max():.4g}")


def _usable(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values > 0)


def provenance_files(material: Material, policy: Policy) -> Outcome:
    """The files that kv-calibrate wrote are as it wrote them: SHA-256 of each against provenance.json."""
    recorded = {name: digest for name, digest in material.provenance["files"].items() if name not in EDITABLE}
    absent = [name for name in recorded if not (material.checkpoint / name).is_file()]
    changed = [name for name, digest in recorded.items() if name not in absent and sha256_file(material.checkpoint / name) != digest]
    reasons = [f"missing: {_some(absent)}"] * bool(absent) + [f"changed since they were written: {_some(changed)}"] * bool(changed)
    if SCALES_FILE not in recorded or "config.json" not in recorded:
        reasons.append("provenance.json records no digest of the scales or of config.json")
    return judged(not reasons, "; ".join(reasons) or f"{len(recorded)} files have the SHA-256 that provenance.json records")


def provenance_weights(material: Material, policy: Policy) -> Outcome:
    """Every weight file is byte for byte one that was calibrated; equal headers do not do."""
    if material.source.value is None:
        return Outcome("fail", f"the weights cannot be read: {material.source.fault}")
    runs = [Counter(row["sha256"] for row in run.get("model", {}).get("weights", ())) for run in material.provenance.get("runs", ())]
    if not runs or not all(runs):
        return Outcome("missing", "provenance.json records no SHA-256 of the weights that were calibrated")
    if any(run != runs[0] for run in runs):
        return Outcome("fail", f"the {len(runs)} collection runs in provenance.json were not all made on the same weights")
    here = Counter(row["sha256"] for row in material.source.value.weight_digests())
    # a shard that held an earlier calibration's scales was written anew, without them: provenance.json records it as a file
    rewritten = Counter({digest: here[digest] for digest in material.provenance["files"].values() if digest in here})
    foreign = (here - runs[0] - rewritten).total()
    lost = max(0, (runs[0] - here).total() - rewritten.total())
    if foreign or lost:
        return Outcome("fail", f"{foreign} of {here.total()} weight files are not those that were calibrated; {lost} of those are not here (SHA-256)")
    return Outcome("pass", f"all {here.total()} weight files have the SHA-256 of those that were calibrated")


def scales_agree(material: Material, policy: Policy) -> Outcome:
    """What engines load is bit for bit what was solved, and what was solved has the digest in provenance.json."""
    if material.expected.value is None or material.tensors.value is None:
        return Outcome("fail", f"the two scales files cannot be compared: {material.tensors.fault or material.expected.fault}")
    expected, stored = material.expected.value, material.tensors.value
    both = [name for name in expected if name in stored]  # absent ones are the coverage rule's
    differ = [name for name in both if expected[name].tobytes() != stored[name][1].tobytes()]
    if differ:
        first = differ[0]
        figures = f"{stored[first][1].flat[0]:.6g} instead of {expected[first].flat[0]:.6g}"
        return Outcome("fail", f"{len(differ)} of {len(both)} scales in {SCALES_FILE} are not the solved ones: {first} is {figures}")
    if material.scales.value.digest() != material.provenance["scales"]:
        return Outcome("fail", "the solved scales have another digest than provenance.json records")
    return Outcome("pass", f"all {len(both)} scales in {SCALES_FILE} equal the solved ones, whose digest provenance.json records")


def statistics(material: Material, policy: Policy) -> Outcome:
    """The statistics kept in the checkpoint are those that the scales were solved from."""
    recorded = material.provenance.get("statistics")
    solved_from = material.scales.value.statistics_digest if material.scales.value else recorded
    if material.statistics.value is None:
        return Outcome("missing", f"the statistics cannot be read: {material.statistics.fault}")
    if recorded != solved_from:
        return Outcome("fail", "scales.safetensors and provenance.json name different statistics as their origin")
    if material.statistics.value.digest() != recorded:
        return Outcome("fail", "statistics.safetensors is not what the scales were solved from: its digest differs from the recorded one")
    return Outcome("pass", f"the statistics of {material.statistics.value.counted['tokens']:,} tokens have the digest that the scales name")
