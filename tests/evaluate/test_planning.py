"""Bytes a token: against numbers worked out by hand, and against what vLLM itself allocates."""

import json

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

from calibrate.cli import main
from calibrate.engines.session import Variant
from calibrate.engines.vllm_engine import VllmEngine
from calibrate.errors import UsageError
from calibrate.evaluate.kvformats import FORMATS, CachedLayer
from calibrate.evaluate.planning import make_plan, model_memory, parse_size, sequence_bytes
from calibrate.model import SourceCheckpoint
from tests.tiny import FAMILIES, tiny_checkpoint, tiny_config

# family, fields as published in the model's config.json, 16-bit bytes of the first token in all layers, and of a token at 32k
PUBLISHED = {
    "Llama-3-8B": (
        "llama",
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
        131_072,  # 32 layers × 8 heads × (128 + 128) × 2
        131_072,
    ),
    "Qwen2.5-7B": (
        "qwen2",
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944},
        57_344,  # 28 × 4 × 256 × 2
        57_344,
    ),
    "DeepSeek-V3": ("deepseek_v3", {}, 61 * 1_152, 61 * 1_152),  # one line of 512 + 64 in each of 61 layers
    "Gemma-3-1B": (
        "gemma3_text",
        {"hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "intermediate_size": 6912},
        26 * 1_024,
        4 * 1_024,  # 22 of 26 layers slide
    ),
    "Qwen3-Next-80B-A3B": ("qwen3_next", {}, 12 * 2_048, 12 * 2_048),  # 12 of 48 layers attend: 2 × 512 × 2
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 24 * 2_048, 12 * 2_048),  # every other layer slides
}


def config_folder(path, family, **changes):
    AutoConfig.for_model(family, **({"max_position_embeddings": 1 << 20} | changes)).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name, tmp_path):
    family, changes, first, growing = PUBLISHED[name]
    memory = model_memory(config_folder(tmp_path, family, **changes))
    plan = make_plan(name, memory, gpu_memory=parse_size("2TiB"), context=32768)
    wide, narrow = plan.formats[:2]
    assert (wide.name, wide.first_token_bytes, wide.token_bytes) == ("16-bit", first, growing)
    assert (narrow.name, narrow.first_token_bytes, narrow.compression) == ("fp8", first / 2, pytest.approx(2, rel=0.2))
    assert narrow.sequences >= wide.sequences


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_planned_from_its_config(family, tmp_path):
    tiny_config(family).save_pretrained(tmp_path)
    memory = model_memory(tmp_path)
    assert memory.layers
    assert all(layer.sixteen_bit > 0 for layer in memory.layers)
    assert (memory.state_bytes > 0) == (family in ("qwen3_next", "nemotron_h"))
    assert (memory.readers > 0) == (family in ("gemma3n_text", "gemma4_text"))
    assert any(layer.latent for layer in memory.layers) == (family == "deepseek_v3")


def test_layers_of_several_head_sizes_count_each(tmp_path):
    tiny_config("gemma4_text").save_pretrained(tmp_path)
    memory = model_memory(tmp_path)
    assert [(layer.kv_heads, layer.key_dim, layer.window) for layer in memory.layers] == [(2, 32, 16), (2, 64, None)] * 2


def test_sliding_layers_stop_at_their_window(tmp_path):
    tiny_config("mistral").save_pretrained(tmp_path)  # window 16
    memory = model_memory(tmp_path)
    assert sequence_bytes(memory, "fp8", 16) == sequence_bytes(memory, "fp8", 400) == 3 * 16 * 2 * 64


LAYER = CachedLayer(5, 1, 128, 128)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("16-bit", 512),
        ("fp8", 256),
        ("int8_per_token_head", 264),
        ("int4_per_token_head", 136),
        ("nvfp4", 144),
        ("turboquant_k8v4", 196),  # 128 + 64 + 4: 2.6×
        ("turboquant_4bit_nc", 134),  # 64 + 2 + 64 + 4: 3.8×
        ("turboquant_3bit_nc", 102),  # 48 + 2 + 48 + 4: 5.0×
        ("kvarn_k4v4_g128", 140),  # 3.66×
        ("kvarn_k4v2_g128", 108),  # 4.74×
        ("kvarn_k2v2_g128", 76),  # 6.74×
    ],
)
def test_bytes_of_one_head_of_128(name, size):
    assert FORMATS[name].token_bytes(LAYER) == size


def test_what_stays_in_sixteen_bits(tmp_path):
    memory = model_memory(config_folder(tmp_path, "llama", num_hidden_layers=6, num_attention_heads=1, hidden_size=128, vocab_size=64))
    assert sequence_bytes(memory, "turboquant_k8v4", 1000) == 1000 * (4 * 512 + 2 * 196)
    assert sequence_bytes(memory, "kvarn_k4v2_g128", 1000) == 6 * (256 * 512 + 744 * 108)
    assert sequence_bytes(memory, "fp8_ds_mla", 1000) is None


def test_ranks_share_heads_and_weights(tmp_path):
    folder = config_folder(tmp_path, "llama", num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, hidden_size=256, vocab_size=64)
    whole, half, eighth = (model_memory(folder, ranks) for ranks in (1, 2, 8))
    assert [memory.layers[0].kv_heads for memory in (whole, half, eighth)] == [4, 2, 1]
    assert half.weight_bytes == whole.weight_bytes / 2


def test_weights_come_from_the_files_where_there_are_any(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", shard="100KB")
    memory = model_memory(folder)
    assert memory.weights_from == "safetensors headers"
    assert memory.weight_bytes == json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 << 30), ("24 GB", 24 * 10**9), ("1.5TiB", 3 << 39), ("1024", 1024)])
def test_sizes(text, size):
    assert parse_size(text) == size


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_command_writes_table_json_and_plot(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", "gemma3_text")
    plain = run(folder, "--gpu-memory", "4GiB", "--context", 300, "--plot", tmp_path / "plan.png")
    assert plain.exit_code == 0, plain.output
    assert "int4_per_token_head" in plain.output
    assert "slide" in plain.output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads(run(folder / "config.json", "--gpu-memory", "4GiB", "--context", 300, "--json").stdout)
    assert data["schema"] == "kv-calibrate/plan/1"
    assert [one["name"] for one in data["formats"]][:2] == ["16-bit", "fp8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "eighty", "--context", "64"], "is no memory size"),
        (["--gpu-memory", "1GiB", "--context", "64"], "weights and reserve need"),
        (["--gpu-memory", "8GiB", "--context", "100000"], "longer than the model's 512"),
    ],
)
def test_unusable_plans_are_one_line(tmp_path, arguments, message):
    tiny_config("llama").save_pretrained(tmp_path)
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_unusable_configs(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        model_memory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nobody-knows"}')
    with pytest.raises(UsageError, match="cannot be read by transformers"):
        model_memory(tmp_path)
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    with pytest.raises(UsageError):
        model_memory(tmp_path)


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_vllm_allocates_what_was_planned(family, tmp_path):
    """The 16-bit cache of a whole engine: its bytes over its tokens, and over the requests that it says it can hold."""
    folder = tiny_checkpoint(tmp_path / "model", family, **({"sliding_window": 128} if family == "gemma3_text" else {}))
    engine = VllmEngine(
        SourceCheckpoint.open(folder),
        folder=tmp_path,
        overlay=lambda variant, root: folder,
        max_model_len=511,  # vLLM is started with one more: whole blocks
        max_num_batched_tokens=64,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
    )
    with engine.session(Variant("16-bit", None)) as session:
        capacity = session.capacity()
    memory = model_memory(folder)
    if family != "gemma3_text":
        assert capacity.bytes / (capacity.blocks * capacity.block_size) == sum(layer.sixteen_bit for layer in memory.layers)
        assert capacity.tokens == pytest.approx(capacity.bytes / sum(layer.sixteen_bit for layer in memory.layers), rel=0.02)
    planned = sequence_bytes(memory, "16-bit", 512, block_size=capacity.block_size, in_flight=64)
    assert capacity.bytes / capacity.max_concurrency == pytest.approx(planned, rel=1e-6)
