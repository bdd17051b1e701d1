"""The rule about read-back: vLLM holds exactly these scales, on every rank."""

from calibrate.evaluate.evidence import ReadbackResult
from calibrate.gate.material import Material
from calibrate.gate.policy import Policy
from calibrate.gate.verdict import Outcome


def readback(result: ReadbackResult, material: Material, policy: Policy) -> Outcome:
    """Every row equal, every rank there, every scale of the file among them. The rows are judged, not the summary that stands above them."""
    said = result.readback
    rows, world = said.get("rows", []), said.get("tensor_parallel_size", 0)
    if said.get("error"):
        return Outcome("fail", f"vLLM would not load or run it: {said['error']}")
    if not rows:
        return Outcome("fail", "the read-back compared nothing")
    bad = [row for row in rows if not row["ok"] or row["loaded"] != row["expected"]]
    if bad:
        first = bad[0]
        where = f"{first['layer']}.{first['kind']}_scale on rank {first['rank']}: {first['reason'] or 'loaded and expected differ'}"
        return Outcome("fail", f"{len(bad)} of {len(rows)} scales that vLLM holds are not the file's: {where}")
    ranks = {row["rank"] for row in rows}
    if ranks != set(range(world)):
        return Outcome("fail", f"the read-back covers {len(ranks)} of {world} tensor-parallel ranks")
    layers = {rank: {(row["layer"], row["kind"]) for row in rows if row["rank"] == rank} for rank in ranks}
    needed = len(material.tensors.value or ())
    short = [rank for rank, seen in layers.items() if len(seen) < needed]
    if short:
        return Outcome("fail", f"the read-back covers {len(layers[short[0]])} of {needed} scales on rank {short[0]}")
    where = f"{said['engine']}, {said['attention_backend']}, kv_cache_dtype {said['kv_cache_dtype']}"
    return Outcome("pass", f"vLLM holds all {len(rows)} scales exactly on {world} rank{'s' * (world > 1)} ({where})")
