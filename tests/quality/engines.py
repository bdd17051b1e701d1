"""What the tests of the quality harness run in processes of their own: an engine takes its process over."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.quality.kernel import Kernel
from calibrate.scales import LayerScales, PolicyOptions, Scales

LAYERS = 3
VALUES = {"first": {"k": 0.02, "v": 0.013, "q": 0.03}, "second": {"k": 0.31, "v": 0.2, "q": 0.7}}
LENGTHS = (90, 17, 64, 2, 64)


def scales_of(value: dict[str, float]) -> Scales:
    """One scale a tensor, another in each layer."""
    layers = tuple(
        LayerScales(index, f"model.layers.{index}.self_attn", *(np.array([value[kind] * (1 + index / 7)], np.float32) for kind in "kvq"))
        for index in range(LAYERS)
    )
    return Scales(layers, PolicyOptions(), {"layers": []}, "", {}, ())


def rows() -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(3, 256, length).astype(np.int32) for seed, length in enumerate(LENGTHS)]


def kernel_of(checkpoint: Path, *, fp8: bool) -> Kernel:
    return Kernel(checkpoint, fp8=fp8, backend=None, longest=max(LENGTHS), step_tokens=160, cache_bytes=64 << 20)


def sixteen_bit(checkpoint: Path, out: Path) -> None:
    """The reference, vLLM's own prompt log probabilities of the same rows, and the reference scored against itself."""
    from vllm import SamplingParams

    kernel, given = kernel_of(checkpoint, fp8=False), rows()
    reference = kernel.reference(given)
    again = kernel.score(given, reference)
    options = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    answers = kernel.llm.generate([{"prompt_token_ids": row.tolist()} for row in given], options, use_tqdm=False)
    theirs = [answer.prompt_logprobs[at][int(row[at])].logprob for row, answer in zip(given, answers, strict=True) for at in range(1, len(row))]
    own = torch.from_numpy(np.concatenate([row[1:] for row in given]).astype(np.int64))
    with torch.inference_mode():
        logits = kernel._output.logits(kernel.hidden(given)).bfloat16().float()
    rounded = logits.log_softmax(-1).gather(1, own[:, None])[:, 0].numpy()
    reference.save(out / "reference.npz")
    np.savez(out / "again.npz", logprob=again.logprob, kl=again.kl, top1=again.top1, theirs=np.array(theirs, np.float32), rounded=rounded)


def in_place(checkpoint: Path, other_weights: Path, reference: Path, out: Path) -> None:
    """Scores of the checkpoint's own scales, of the second ones set in place, of other weights, and of all put back."""
    from benchmarks.quality.scoring import Reference

    kernel, given, against = kernel_of(checkpoint, fp8=True), rows(), Reference.load(reference)
    found = {"own": kernel.score(given, against)}
    kernel.set_scales(scales_of(VALUES["second"]))
    found["second"] = kernel.score(given, against)
    kernel.set_scales(scales_of(VALUES["first"]))
    found["first"] = kernel.score(given, against)
    for layer in scales_of(VALUES["second"]).layers:
        kernel.set_layer(layer)
    found["by layer"] = kernel.score(given, against)
    kernel.set_weights({name: tensor for name, tensor in load_file(other_weights).items() if "layers.1." in name})
    found["weights"] = kernel.score(given, against)
    kernel.restore_weights()
    found["restored"] = kernel.score(given, against)
    np.savez(out, **{f"{name}-{field}": getattr(scores, field) for name, scores in found.items() for field in ("logprob", "kl", "top1")})


def fresh(checkpoint: Path, reference: Path, out: Path) -> None:
    """Scores of a checkpoint as it is."""
    from benchmarks.quality.scoring import Reference

    scores = kernel_of(checkpoint, fp8=True).score(rows(), Reference.load(reference))
    np.savez(out, logprob=scores.logprob, kl=scores.kl, top1=scores.top1)


def mixed(first: Path, second: Path, out: Path) -> None:
    """The first checkpoint's tensors with layer 1 of the second."""
    from safetensors.torch import save_file

    tensors, others = load_file(first), load_file(second)
    save_file({name: others[name] if "layers.1." in name else tensor for name, tensor in tensors.items()}, out, metadata={"format": "pt"})


def whole_kl(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL over the whole vocabulary, float64 [n]."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
