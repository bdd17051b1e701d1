"""What doctor says about machines that are not this one, and about this one."""

import io
import json

import pytest
from rich.console import Console

from calibrate import host
from calibrate.host import Cpu, Gpu, cpu_has_fast_bf16, describe_host, judge_stages, parse_cpuinfo, render

SAPPHIRE = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 amx_bf16 amx_tile
"""
BROADWELL = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) CPU E5-2690 v4\nflags\t\t: fpu sse2 avx avx2\n"
GRAVITON = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd bf16 sve\nCPU part\t: 0xd40\n"
AVX2 = Cpu("old", frozenset({"avx2"}))
AVX512 = Cpu("new", frozenset({"avx2", "avx512f"}))
H100, T4 = Gpu("H100", 80 << 30, (9, 0)), Gpu("T4", 16 << 30, (7, 5))


@pytest.mark.parametrize(
    ("text", "model", "flag", "fast"),
    [(SAPPHIRE, "Platinum 8481C", "amx_bf16", True), (BROADWELL, "E5-2690 v4", "avx2", False), (GRAVITON, "", "sve", False)],
)
def test_cpuinfo_is_read(text, model, flag, fast):
    cpu = parse_cpuinfo(text)
    assert model in cpu.model
    assert flag in cpu.flags
    assert cpu_has_fast_bf16(cpu) is fast


def test_flags_that_the_system_does_not_tell_stay_unknown():
    cpu = parse_cpuinfo("processor\t: 0\n")
    assert cpu.flags is None
    assert cpu_has_fast_bf16(cpu) is False
    assert "does not tell" in judge_stages(cpu, (), None)[0].reason


@pytest.mark.parametrize(
    ("cpu", "gpus", "engine", "verify", "fp8", "why"),
    [
        (AVX2, (), "vllm-cpu", True, False, "AVX-512"),
        (AVX512, (), "vllm-cpu", True, True, "head_dim"),
        (AVX2, (H100,), "vllm", True, True, "9.0"),
        (AVX2, (H100, T4), "vllm", True, False, "7.5 is below 8.9"),  # every GPU must be able
        (AVX512, (), "vllm", False, False, "see verify"),
        (AVX512, (), None, False, False, "see verify"),
    ],
)
def test_stages_say_yes_or_no_with_the_reason(cpu, gpus, engine, verify, fp8, why):
    stages = {stage.name: stage for stage in judge_stages(cpu, gpus, engine)}
    assert stages["collect"].can
    assert stages["solve"].can
    assert stages["write"].can
    assert stages["verify"].can is verify
    assert stages["fp8 in vLLM"].can is fp8
    assert why in stages["fp8 in vLLM"].reason


def test_the_cuda_engine_without_a_gpu_says_what_to_do():
    (verify,) = (stage for stage in judge_stages(AVX512, (), "vllm") if stage.name == "verify")
    assert "KV_CALIBRATE_ENGINE=cpu" in verify.reason


def test_this_machine_is_described_and_rendered(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_CALIBRATE_CACHE", str(tmp_path / "not [made] yet"))
    report = describe_host()
    assert report.cores >= 1
    assert report.memory_bytes > 1 << 28
    assert report.packages["torch"]
    assert report.disk_free[str(tmp_path / "not [made] yet")] > 0
    plain = json.loads(json.dumps(report.as_dict()))
    assert [stage["name"] for stage in plain["stages"]] == ["collect", "solve", "write", "verify", "fp8 in vLLM"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    text = console.export_text()
    assert "not [made] yet" in text
    assert report.packages["torch"] in text


def test_cache_root_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("KV_CALIBRATE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert host.cache_root() == tmp_path / "kv-calibrate"
    monkeypatch.setenv("KV_CALIBRATE_CACHE", str(tmp_path / "own"))
    assert host.cache_root() == tmp_path / "own"
