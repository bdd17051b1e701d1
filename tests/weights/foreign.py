"""Tiny AWQ, GPTQ and FP8 checkpoints whose weights are known before they are packed, by loops that follow each format's own packing code."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import edit_config, tiny_checkpoint  # edit_config is for the tests too

SHAPE = {"hidden_size": 128, "intermediate_size": 256}  # groups of 128 fit
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ, WQLinear_GEMM.from_linear: qweight[:, col] |= intweight[:, 8 * col + ORDER[i]] << 4 * i


@dataclass
class Foreign:
    """`weights`: module → its dequantized weight [out, in], from the codes themselves. `dense`: a checkpoint with just these."""

    path: Path
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def dense(self, path: Path) -> Path:
        tensors = {
            name: tensor for name, tensor in load_file(self.path / "model.safetensors").items() if name.rpartition(".")[2] in ("weight", "bias")
        }
        tensors |= {f"{module}.weight": weight for module, weight in self.weights.items()}
        return rewrite(self.path, path, tensors, quantization_config=None)


def rewrite(source: Path, target: Path, tensors: dict[str, torch.Tensor], **config) -> Path:
    """The checkpoint `source` with other tensors and config fields."""
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix == ".json" and not file.name.endswith(".index.json"):
            (target / file.name).write_bytes(file.read_bytes())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors", metadata={"format": "pt"})
    edit_config(target, **config)
    return target


def linears(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]


def pack_rows(values: np.ndarray, bits: int, order=None) -> torch.Tensor:
    """[rows, n] → int32 [rows, n·bits/32]: value order[i] of each run at bits·i. One value after another, as AutoAWQ and AutoGPTQ pack."""
    run = 32 // bits
    order = order or range(run)
    packed = np.zeros((values.shape[0], values.shape[1] // run), dtype=np.uint32)
    for column in range(packed.shape[1]):
        for place in range(run):
            packed[:, column] |= values[:, column * run + order[place]].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32).copy())


def codes_of(weight: torch.Tensor, bits: int, size: int, *, symmetric: bool, dtype: torch.dtype, order: np.ndarray | None = None):
    """Codes uint [in, out], zeros [groups, out], scales [groups, out], group of each input, and the weight [out, in] that they mean, in `dtype`."""
    values = weight.float().T.numpy()  # [in, out]
    size = len(values) if size == -1 else size
    group = np.arange(len(values)) // size if order is None else order
    groups, largest = len(values) // size, (1 << bits) - 1
    scales, zeros = np.zeros((groups, values.shape[1]), np.float32), np.full((groups, values.shape[1]), 1 << (bits - 1), np.int64)
    for number in range(groups):
        rows = values[group == number]
        low, high = np.minimum(rows.min(0), 0), np.maximum(rows.max(0), 0)
        scales[number] = (2 * np.maximum(high, -low) if symmetric else high - low) / largest
        if not symmetric:
            zeros[number] = np.clip(np.round(-low / scales[number]), 1, largest)
    stored = torch.from_numpy(scales).to(dtype)
    codes = np.clip(np.round(values / stored.float().numpy()[group]) + zeros[group], 0, largest).astype(np.int64)
    meant = torch.from_numpy(codes - zeros[group]).to(dtype) * stored[torch.from_numpy(group)]
    return codes, zeros, stored, group, meant.T.contiguous()


def awq(path: Path, *, group_size: int = 32, symmetric: bool = False, dtype: torch.dtype = torch.float16, **config) -> Foreign:
    """AutoAWQ, gemm."""
    tensors = _source(path, dtype)
    made = Foreign(path)
    for module in linears(tensors):
        codes, zeros, scales, _, made.weights[module] = codes_of(tensors.pop(f"{module}.weight"), 4, group_size, symmetric=symmetric, dtype=dtype)
        tensors |= {
            f"{module}.qweight": pack_rows(codes, 4, AWQ_ORDER),
            f"{module}.qzeros": pack_rows(zeros, 4, AWQ_ORDER),
            f"{module}.scales": scales,
        }
    settings = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
    rewrite(path, path, tensors, quantization_config=settings | config)
    return made


def gptq(
    path: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    desc_act: bool = False,
    dtype: torch.dtype = torch.float16,
    v2: bool = False,
    **config,
) -> Foreign:
    """AutoGPTQ (zero - 1 is stored) or GPTQModel's v2 (zero is)."""
    tensors = _source(path, dtype)
    made = Foreign(path)
    for number, module in enumerate(linears(tensors)):
        weight = tensors.pop(f"{module}.weight")
        order = None
        if desc_act:
            order = np.random.default_rng(number).permutation(weight.shape[1]) // group_size
        codes, zeros, scales, group, made.weights[module] = codes_of(weight, bits, group_size, symmetric=symmetric, dtype=dtype, order=order)
        tensors |= {
            f"{module}.qweight": pack_rows(codes.T, bits).T,
            f"{module}.qzeros": pack_rows(zeros - (0 if v2 else 1), bits),
            f"{module}.scales": scales,
            f"{module}.g_idx": torch.from_numpy(group.astype(np.int32)),
        }
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": symmetric, "desc_act": desc_act}
    rewrite(path, path, tensors, quantization_config=settings | ({"checkpoint_format": "gptq_v2"} if v2 else {}) | config)
    return made


def fp8(
    path: Path,
    *,
    block: tuple[int, int] | None = None,
    static: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    vision_language: str | None = None,
    **config,
) -> Foreign:
    """One scale a tensor (AutoFP8), or one a block (DeepSeek's form), the last ones smaller where they do not divide the shape.

    vision_language: the type of a model in the llama's place, whose towers stay as they are.
    """
    tensors = load_file(tiny_checkpoint(path, vision_language, dtype=dtype) / "model.safetensors") if vision_language else _source(path, dtype)
    made = Foreign(path)
    for number, module in enumerate(name for name in linears(tensors) if "vision" not in name):
        weight = tensors.pop(f"{module}.weight").float()
        if block:
            tensors[f"{module}.weight_scale_inv"] = scale = block_scales(weight, block)
            rows, columns = (torch.arange(size) // part for size, part in zip(weight.shape, block, strict=True))
            whole = scale[rows][:, columns]
        else:
            scale = whole = weight.abs().max() / 448
            tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight"] = stored = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        made.weights[module] = stored.float() * whole
        if static:
            tensors[f"{module}.input_scale"] = torch.tensor(0.01 + number / 1000)
    blocks = {"weight_block_size": list(block)} if block else {}
    settings = {"quant_method": "fp8", "activation_scheme": "static" if static else "dynamic", **blocks}
    rewrite(path, path, tensors, quantization_config=settings | config)
    return made


def block_scales(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block over 448, fp32."""
    rows = [part.abs().amax(0) for part in weight.float().split(block[0])]
    return torch.stack([torch.stack([part.amax() for part in row.split(block[1])]) for row in rows]) / 448


def edit_tensors(path: Path, edit) -> None:
    """Change a single-file checkpoint's tensors in place."""
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def shard(path: Path, of) -> None:
    """Spread model.safetensors over two files by `of(name)` → 0 or 1, with an index."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    placed = {name: f"model-0000{1 + of(name)}-of-00002.safetensors" for name in tensors}
    for file in set(placed.values()):
        save_file({name: tensor for name, tensor in tensors.items() if placed[name] == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def _source(path: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return load_file(tiny_checkpoint(path, "llama", dtype=dtype, **SHAPE) / "model.safetensors")
