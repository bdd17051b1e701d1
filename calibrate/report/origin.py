"""Where the scales come from: digests, corpus, versions, options, and a command that makes them again. Local paths are cut to their last part."""

import shlex
from typing import Any

from calibrate.artefact import public
from calibrate.gate.integrity import EDITABLE
from calibrate.gate.material import Material

_OPTIONS = {"policy": "--policy", "granularity": "--granularity", "number_format": "--format", "margin": "--margin"}


def origin(material: Material) -> list[tuple[str, str]]:
    """Rows of name and value; runs that were merged are listed one after the other."""
    provenance = material.provenance
    options, counted = provenance.get("options", {}), provenance.get("counted", {})
    each = "KV head" if options.get("granularity") == "head" else "tensor"
    rows = [
        ("format", f"FP8 {str(options.get('number_format', '')).upper()}, one scale a {each}"),
        ("policy", f"{options.get('policy')}, margin {options.get('margin')}"),
        ("calibrated on", ", ".join(f"{count:,} {what}" for what, count in counted.items())),
    ]
    for run in provenance.get("runs", []):
        rows += _run(run, options)
    digests = [("scales", provenance.get("scales")), ("statistics", provenance.get("statistics"))]
    digests += [("weights", provenance.get("model", {}).get("fingerprint"))]
    digests += [(name, digest) for name, digest in provenance["files"].items() if name not in EDITABLE]
    return rows + [(f"digest of {name}", str(digest)) for name, digest in digests]


def _run(run: dict[str, Any], options: dict[str, Any]) -> list[tuple[str, str]]:
    corpus = run.get("corpus", {})
    versions = ", ".join(f"{name} {number}" for name, number in run.get("versions", {}).items())
    return [
        ("made with", f"{run.get('tool')}; {versions}"),
        ("computed in", f"{run.get('compute_dtype')} on {run.get('device')}, {run.get('attention')} attention"),
        ("corpus", f"{', '.join(public(str(source.get('data'))) for source in corpus.get('sources', []))}; seed {corpus.get('seed')}"),
        ("digest of the corpus", str(corpus.get("digest"))),
        ("again with", command(corpus, options)),
    ]


def command(corpus: dict[str, Any], options: dict[str, Any]) -> str:
    """The `run` command with what is recorded; the model and local files are the reader's own."""
    words = ["kv-calibrate", "run", "MODEL"]
    if corpus.get("data", "default") != "default":
        words += ["--data", public(str(corpus["data"]))]
    for key, option in (("samples_asked", "--samples"), ("sequence_length", "--sequence-length"), ("seed", "--seed")):
        if isinstance(corpus.get(key), int):
            words += [option, str(corpus[key])]
    words += [word for key, option in _OPTIONS.items() if key in options for word in (option, str(options[key]))]
    return shlex.join(words)
