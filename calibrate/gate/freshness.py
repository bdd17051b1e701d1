"""Rules about the evidence as such: is it all there, about this very checkpoint, made by an engine that the policy accepts."""

from importlib.metadata import version

from calibrate.engines.host import vllm_distribution
from calibrate.engines.session import EngineInfo
from calibrate.errors import HostError
from calibrate.gate.material import Material
from calibrate.gate.policy import Policy
from calibrate.gate.select import absent, wanted
from calibrate.gate.verdict import Outcome, judged


def evidence_complete(material: Material, policy: Policy) -> Outcome:
    """Every kind of evidence that the policy needs is there and can be read."""
    evidence = material.evidence
    found = {kind: evidence.name_of(kind, policy.engines) for kind in wanted(policy)}
    reasons = [absent(kind, policy) for kind, name in found.items() if name is None]
    reasons += [evidence.faults[name] for name in found.values() if name in evidence.faults]
    if reasons:
        return Outcome("missing", "; ".join(reasons))
    return Outcome("pass", f"all is there: {', '.join(found.values())}")


def evidence_subject(material: Material, policy: Policy) -> Outcome:
    """No evidence was copied from elsewhere or outlived a change of the checkpoint."""
    results = material.evidence.results
    if material.subject.value is None:
        return Outcome("fail", f"this checkpoint cannot be identified: {material.subject.fault}")
    if not results:
        return Outcome("missing", "there is no evidence at all")
    reasons = []
    for name, result in results.items():
        mine, its = material.subject.value.model_dump(), result.subject.model_dump()
        differ = [field.replace("_", " ") for field in mine if mine[field] != its[field]]
        if differ:
            reasons.append(f"{name} is about another checkpoint ({', '.join(differ)} differ)")
    return judged(not reasons, "; ".join(reasons) or f"{len(results)} results are about this very checkpoint")


def evidence_engine(material: Material, policy: Policy) -> Outcome:
    """Results were made by the engine version installed here, or by one that the policy lists; what it ran on (", torch 2.13.0") may differ."""
    made = _engines(material, policy)
    if not made:
        return Outcome("missing", "there is no result of an engine")
    accepted = {*installed(), *policy.accept_versions}
    reasons = [f"{name} was made by {engine}" for name, engine in made if not {engine, engine.partition(", ")[0]} & accepted]
    limit = " or ".join(sorted(accepted)) or "no engine is installed here and the policy lists none"
    if reasons:
        return Outcome("fail", f"{'; '.join(dict.fromkeys(reasons))}, which is neither installed here nor accepted by the policy", limit)
    return Outcome("pass", f"made by {', '.join(sorted({engine for _, engine in made}))}", limit)


def installed() -> tuple[str, ...]:
    """The engines of this environment, as results name them."""
    found = [f"transformers {version('transformers')}"]
    try:
        found.append(vllm_distribution())
    except HostError:  # none here: then only the policy can accept its results
        return tuple(found)
    return tuple(found)


def _engines(material: Material, policy: Policy) -> list[tuple[str, str]]:
    made = []
    for kind in wanted(policy):
        name = material.evidence.name_of(kind, policy.engines)
        result = material.evidence.results.get(name)
        if result is None:
            continue
        if kind == "readback":
            made.append((name, str(result.readback.get("engine", "an unnamed engine"))))
            continue
        asked = name.removesuffix(".json").rsplit("-", 1)[-1]
        made += [(name, _checked(info, asked)) for info in _infos(result)]
    return made


def _infos(result) -> list[EngineInfo]:
    return [one.engine for one in (result.fidelity if hasattr(result, "fidelity") else result.variants)]


def _checked(info: EngineInfo, asked: str) -> str:
    return info.version if info.engine == asked else f"{info.engine} in a file named for {asked} ({info.version})"
