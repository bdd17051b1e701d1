"""Families that vLLM gives no scales: the list is derived anew from the installed vLLM's source, and refusals come before any work."""

import ast
import importlib.util
from pathlib import Path

import pytest

from calibrate.errors import UsageError
from calibrate.model import SourceCheckpoint, probe_layout
from calibrate.model.support import LATENT_REASON, NO_QUANT_CONFIG_REASON, OTHER_CACHE_REASON, WITHOUT_QUANT_CONFIG, unsupported
from tests.tiny import FAMILIES, edit_config, tiny_checkpoint

_CACHING = {"Attention", "MLAAttention", "ChunkedLocalAttention", "StaticSinkAttention", "RSWAAttention", "PrefillPrefixLMAttention"}
_SERVED = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")  # generation; pooling models keep no cache that is worth a scale


@pytest.fixture(scope="module")
def vllm_root() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed: there is no source to derive the list from")
    return Path(spec.origin).parent


def _trees(root: Path) -> dict[str, ast.Module]:
    files = [*(root / "model_executor" / "models").rglob("*.py"), *(root / "models").rglob("*.py")]
    return {file.relative_to(root).with_suffix("").as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _builds_without_quant_config(tree: ast.Module) -> bool:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CACHING]
    return any(not {None, "quant_config"} & {keyword.arg for keyword in call.keywords} for call in calls)


def _derived(tree: ast.Module, stems: set[str]) -> set[str]:
    """Classes here that are derived from one of these files' classes."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2] in stems]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {one.name for one in classes if any(isinstance(base, ast.Name) and base.id in names for base in one.bases)}


def _registered(root: Path) -> dict[str, tuple[str, str]]:
    """Architecture → file stem and class, of the models that vLLM generates with."""
    tree = ast.parse((root / "model_executor" / "models" / "registry.py").read_text(encoding="utf-8"))
    tables = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id in _SERVED]
    assert len(tables) == len(_SERVED), "vLLM's registry has changed its shape"
    return {name: (entry[0].rpartition(".")[2], entry[1]) for table in tables for name, entry in ast.literal_eval(table.value).items()}


def test_the_list_is_what_vllms_source_says(vllm_root):
    trees = _trees(vllm_root)
    assert len(trees) > 250
    stems = {name.rpartition("/")[2] for name, tree in trees.items() if _builds_without_quant_config(tree)}
    derived = set().union(*(_derived(tree, stems) for tree in trees.values()))
    found = {architecture for architecture, (stem, name) in _registered(vllm_root).items() if stem in stems or name in derived}
    assert found == {architecture for architectures in WITHOUT_QUANT_CONFIG.values() for architecture in architectures}


def test_the_scan_sees_a_call_without_it():
    """The negative control: the scan tells the two calls apart."""
    assert _builds_without_quant_config(ast.parse("self.attn = Attention(1, 2, cache_config=c)"))
    assert not _builds_without_quant_config(ast.parse("self.attn = Attention(1, 2, cache_config=c, quant_config=q)"))


@pytest.mark.parametrize("config", [{"model_type": "step3_vl", "text_config": {"model_type": "step3_text"}}, {"architectures": ["JambaForCausalLM"]}])
def test_wrappers_and_architectures_are_known_too(config):
    assert NO_QUANT_CONFIG_REASON in unsupported(config)


def test_latent_attention_is_told_from_models_that_only_name_a_rank():
    assert LATENT_REASON in unsupported({"model_type": "deepseek_v3", "kv_lora_rank": 512})
    assert LATENT_REASON in unsupported({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "kv_lora_rank": 512}})
    assert OTHER_CACHE_REASON in unsupported({"model_type": "minicpm3", "kv_lora_rank": 256})  # seen: tests/families/test_check.py
    assert [family for family in FAMILIES if unsupported({"model_type": family})] == []


@pytest.mark.parametrize("model_type", WITHOUT_QUANT_CONFIG)
def test_refused_by_name_before_any_work(tmp_path, model_type):
    source = tiny_checkpoint(tmp_path / "source", "llama")
    edit_config(source, model_type=model_type, architectures=["LlamaForCausalLM"])
    with pytest.raises(UsageError, match=rf"source: {model_type}: vLLM builds its attention without a quantization config.*`kv-calibrate collect`"):
        SourceCheckpoint.open(source).check_can_carry_scales()


def test_attention_that_is_no_part_of_the_model_is_one_line():
    """BigBird makes its attention modules anew while it runs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("big_bird", is_decoder=True, **sizes))
    with pytest.raises(UsageError, match=r"layer 0 is computed by a BigBirdSelfAttention that the model makes while it runs"):
        probe_layout(model.eval())
