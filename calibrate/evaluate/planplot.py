"""The plan as a picture: the cache of one sequence against the weights, and the sequences that fit, as the context grows."""

import io
from pathlib import Path

from calibrate.artefact import atomic_path
from calibrate.evaluate.kvformats import SIXTEEN_BIT
from calibrate.evaluate.planning import Plan, sequence_bytes

# Distinguishable in grey and by colour-blind readers: each line has its own dash as well.
_SHOWN = {
    SIXTEEN_BIT: ("#1b1b1b", "-"),
    "fp8": ("#0b62c4", "-"),
    "int4_per_token_head": ("#c44b0b", "--"),
    "turboquant_4bit_nc": ("#2e8b57", "-."),
    "kvarn_k4v2_g128": ("#8a2be2", ":"),
}
_GIB = 1 << 30
_LEAST_CONTEXT = 1024


def draw(plan: Plan, path: Path) -> None:
    """Write a PNG. Raises UsageError where `path` cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    contexts = _contexts(plan)
    shown = [name for name in _SHOWN if any(fmt.name == name for fmt in plan.formats)]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for name in shown:
        colour, dash = _SHOWN[name]
        sizes = [sequence_bytes(plan.memory, name, tokens) for tokens in contexts]
        left.plot(contexts, [size / _GIB for size in sizes], dash, color=colour, linewidth=2, label=name)
        right.plot(contexts, [plan.cache_bytes / size for size in sizes], dash, color=colour, linewidth=2, label=name)
    weights, free = plan.memory.weight_bytes / _GIB, plan.cache_bytes / _GIB
    for height, text in ((weights, f"weights {weights:.3g} GiB"), (free, f"left for the cache {free:.3g} GiB")):
        left.axhline(height, color="#777777", linewidth=1)
        left.annotate(text, (contexts[0], height), xytext=(2, 3), textcoords="offset points", fontsize=8, color="#444444")
    right.axhline(1, color="#777777", linewidth=1)
    left.set(title="Cache of one sequence", ylabel="GiB on each GPU")
    right.set(title=f"Sequences that fit in {plan.gpu_memory / _GIB:.4g} GiB at {plan.utilization:.0%}", ylabel="sequences")
    for axes in (left, right):
        axes.set(xscale="log", yscale="log", xlabel="context, tokens")
        axes.axvline(plan.context, color="#bbbbbb", linewidth=1, linestyle=(0, (2, 2)))
        axes.set_xticks(contexts, minor=False)
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: f"{tokens / 1024:.4g}k"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.grid(color="#e5e5e5", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(fontsize=8, frameon=False)
    figure.suptitle(f"{plan.model}: KV cache and weights, tensor parallel {plan.tensor_parallel_size}", fontsize=12)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    pyplot.close(figure)
    with atomic_path(path) as temporary:
        temporary.write_bytes(picture.getvalue())


def _contexts(plan: Plan) -> list[int]:
    """Powers of two up to the model's limit, at least to the planned context."""
    most = max(plan.memory.longest_context or 2 * plan.context, plan.context)
    tokens, found = min(_LEAST_CONTEXT, plan.context), []
    while tokens < most:
        found.append(tokens)
        tokens *= 2
    return [*found, most]
