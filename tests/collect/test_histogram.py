"""The counting kernel against the plain path: on a GPU as it is used, elsewhere its very source with a host thread for each of CUDA's."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.collect import collect
from calibrate.collect.histogram_cuda import SOURCE, Histogram, KernelError, Shape, chunks_of, compiled, histogram_for, macros
from calibrate.collect.ledger import Ledger
from calibrate.collect.observer import Observer
from calibrate.model import AttentionLayer, CacheLayout
from calibrate.statistics import CACHE_DTYPES, CODES
from tests.collect.test_known_answers import LENGTHS, _interrupt_after
from tests.conftest import collect_run, rows_corpus

SHIM = Path(__file__).with_name("histogram_host.cpp")
LENGTHS_OF = {"whole": [37, 37, 37], "padded": [37, 5, 20], "one left": [1, 37, 1]}


def values_of(kind: str, dim: int, dtype: torch.dtype, *, heads: int = 3, batch: int = 3, seq: int = 37, seed: int = 0) -> torch.Tensor:
    """[batch, heads, seq, dim] as a transposed view, as attention layers hand it over."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, seq, heads, dim)
    values = torch.randn(shape, generator=generator)
    if kind == "skewed":
        values = torch.exp(4 * values) * torch.randn(shape, generator=generator).sign()
        values[..., 0] = 3e4
    elif kind == "constant":
        values = torch.full(shape, -0.75)
    elif kind == "zero":
        values = torch.zeros(shape)
        values[..., ::2] = -0.0
    elif kind == "nonfinite":
        values[0, 3, 1, 2], values[1, 2, 0, 1], values[2, 0, 2, 0] = float("nan"), float("inf"), -float("inf")
    elif kind == "every code":
        codes = torch.arange(values.numel(), dtype=torch.int32) * 127 % (2 * CODES)
        return (codes - CODES).to(torch.int16).view(dtype).view(shape).transpose(1, 2)
    return values.to(dtype).transpose(1, 2)


def plainly(values: torch.Tensor, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Counts and largest codes by definition: a loop over rows, and NumPy's bincount."""
    codes = values.cpu().view(torch.int16).numpy() & (CODES - 1)
    heads = [np.concatenate([codes[row, head, :length].ravel() for row, length in enumerate(lengths)]) for head in range(values.shape[1])]
    return np.stack([np.bincount(head, minlength=CODES) for head in heads]), np.array([head.max() for head in heads])


def sums_of(values: torch.Tensor, lengths: list[int]) -> np.ndarray:
    exact = [values[row, :, :length].double() for row, length in enumerate(lengths)]
    return torch.stack([sum(one.sum(dim=1) for one in exact), sum(one.square().sum(dim=1) for one in exact)]).cpu().numpy()


@pytest.fixture(scope="module")
def host_kernel(tmp_path_factory):
    """Calls the kernel's source, compiled for this machine's processor."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here to compile the kernel's source for the host")
    built = {}

    def call(values, lengths, *, sums, shape, chunks=2):
        batch, heads, seq, dim = values.shape
        wide = dim % 8 == 0 and values.data_ptr() % 16 == 0
        options = tuple(macros(shape, half=values.dtype == torch.float16, wide=wide, sums=sums))
        if options not in built:
            library = tmp_path_factory.mktemp("kernel") / "kernel.so"
            command = [compiler, "-std=c++20", "-O1", "-pthread", "-shared", "-fPIC", f"-I{SOURCE.parent}", *options, SHIM, "-o", library]
            subprocess.run(command, check=True, capture_output=True)
            built[options] = ctypes.CDLL(str(library))
        counts = torch.zeros((heads, CODES), dtype=torch.int64)
        amax = torch.zeros(heads, dtype=torch.int32)
        parts = torch.full((chunks, 2, heads, dim), float("nan"), dtype=torch.float64)
        true = torch.tensor(lengths, dtype=torch.int32)
        strides = [ctypes.c_longlong(stride) for stride in values.stride()[:3]]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, true, counts, amax, parts)]
        built[options].launch(chunks, heads, pointers[0], *strides, pointers[1], batch, seq, dim, *pointers[2:])
        return counts.numpy(), amax.numpy(), parts.sum(dim=0).numpy()

    return call


@pytest.mark.parametrize("bins", [CODES, 4096])
@pytest.mark.parametrize("kind", ["random", "skewed", "constant", "zero", "nonfinite", "every code"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_source_counts_what_the_plain_path_counts(host_kernel, dtype, kind, bins):
    shape = Shape(32, 4, 0 if bins == CODES else 0x3C00, bins)
    values, lengths = values_of(kind, 24, dtype), LENGTHS_OF["padded"]
    counts, amax, _ = host_kernel(values, lengths, sums=False, shape=shape)
    expected, top = plainly(values, lengths)
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_array_equal(amax, top)


@pytest.mark.parametrize("lengths", LENGTHS_OF.values(), ids=LENGTHS_OF)
@pytest.mark.parametrize("dim", [80, 96, 128, 20])
def test_the_source_adds_up_channels(host_kernel, dim, lengths):
    values = values_of("random", dim, torch.bfloat16)
    values[1, :, lengths[1] :] = float("nan")  # padding
    for chunks in (1, 3):
        counts, amax, sums = host_kernel(values, lengths, sums=True, shape=Shape(48, 2), chunks=chunks)
        expected, top = plainly(values, lengths)
        np.testing.assert_array_equal(counts, expected)
        np.testing.assert_array_equal(amax, top)
        np.testing.assert_allclose(sums, sums_of(values, lengths), rtol=1e-12, atol=1e-12)


def test_blocks_fill_the_multiprocessors():
    assert chunks_of(8, 8192, 132) == 16  # 128 blocks of 132, in one wave
    assert chunks_of(32, 8192, 132) == 4
    assert all(1 <= chunks_of(heads, 1 << 17, 132) <= 132 for heads in (1, 3, 9, 71, 128))


def test_a_gpu_with_little_shared_memory_counts_the_common_codes_there():
    bfloat16, float16 = CACHE_DTYPES["bfloat16"], CACHE_DTYPES["float16"]
    assert Shape.fitting(232_448, bfloat16).bins == CODES  # H100, H200
    small = Shape.fitting(101_376, bfloat16)  # L40S, RTX 4090
    assert (small.low, small.bins) == (CODES - small.bins, 24_576)
    for dtype in (bfloat16, float16):
        least = Shape.fitting(65_536, dtype)  # T4
        values = dtype.decode()
        assert 4 * least.bins + 16 <= 65_536
        assert values[least.low] < 2e-3
        assert values[least.low + least.bins - 1] > 7


def test_without_cuda_the_reason_is_noted_once(monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", None)
    histogram_for.cache_clear()
    try:
        assert [histogram_for(torch.device("cuda:0"), CACHE_DTYPES["bfloat16"]) for _ in range(3)] == [None] * 3
    finally:
        histogram_for.cache_clear()
    said = capsys.readouterr().err
    assert said.count("counting by torch.bincount") == 1
    assert "not built for CUDA" in said


def _with_ledgers(monkeypatch) -> None:
    """What is kept on a GPU's ledger otherwise is kept on one here, and a batch is settled when the next has begun."""

    def ledger(self, device):
        return self._ledgers.setdefault(device, Ledger(self.layout, device)) if device not in self._ledgers else self._ledgers[device]

    monkeypatch.setattr(Observer, "_ledger", ledger)
    monkeypatch.setattr("calibrate.collect.collector._can_run_ahead", lambda run: True)


def test_a_ledger_and_running_ahead_change_no_byte(llama, tmp_path, monkeypatch):
    run = collect_run(llama, rows_corpus(LENGTHS))
    expected = collect(run).digest()
    _with_ledgers(monkeypatch)
    assert collect(run).digest() == expected
    state = tmp_path / "state.safetensors"
    for stop_after in (1, 3):
        _interrupt_after(run, state, stop_after, monkeypatch)
    assert collect(run, state=state).digest() == expected
    assert collect(run, state=tmp_path / "often.safetensors", state_seconds=0.0).digest() == expected


# On a GPU
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


def on_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def _observed(values: torch.Tensor, lengths: list[int], cache_dtype: str, *, kernel: bool) -> dict:
    heads, dim = values.shape[1], values.shape[3]
    layout = CacheLayout("planted", (AttentionLayer(0, "attention", 0, heads, heads, dim, dim),))
    observer = Observer(layout, CACHE_DTYPES[cache_dtype], kernel=kernel)
    for part in (1, 3):
        observer.begin(lengths, values.shape[2], values.device)
        for kind in ("k", "v", "q"):
            observer.see(0, kind, values)
        bad = observer.end(part)
    return {"bad": bad, "layers": observer.layers(), "counts": {key: counts.cpu().numpy() for key, counts in observer.counts.items()}}


@on_gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 20])
@pytest.mark.parametrize("kind", ["random", "skewed", "constant", "zero", "nonfinite", "every code"])
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float16"])
def test_the_kernel_counts_what_the_plain_path_counts(cache_dtype, kind, dim):
    dtype, seq = CACHE_DTYPES[cache_dtype].dtype, 700
    values = values_of(kind, dim, dtype, heads=5, seq=seq).cuda()
    for lengths in ([seq] * 3, [seq, 1, 333]):
        given = values.clone()
        given[1, :, lengths[1] :] = float("nan")
        mine, plain = (_observed(given, lengths, cache_dtype, kernel=kernel) for kernel in (True, False))
        expected, _ = plainly(given, lengths)
        for key in (0, "k"), (0, "v"), (0, "q"):
            np.testing.assert_array_equal(mine["counts"][key], 2 * expected)
            np.testing.assert_array_equal(plain["counts"][key], 2 * expected)
        assert mine["bad"] == plain["bad"]
        if mine["bad"]:
            continue
        again = _observed(given, lengths, cache_dtype, kernel=True)
        for kind_ in "kvq":
            one, other = mine["layers"][0][kind_], plain["layers"][0][kind_]
            np.testing.assert_array_equal(one.part_amax, other.part_amax)
            if kind_ != "q":
                np.testing.assert_array_equal(one.sums, again["layers"][0][kind_].sums)  # the same bits in each run
                for got, wanted in zip(one.moments(), other.moments(), strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(wanted).max())))


@on_gpu
def test_other_shapes_of_the_kernel_count_the_same():
    """Windows as on GPUs with less shared memory; rows that are not aligned; a type that is rounded first."""
    device, bfloat16 = torch.device("cuda:0"), CACHE_DTYPES["bfloat16"]
    values = values_of("every code", 64, torch.bfloat16, heads=4, seq=300).cuda()
    lengths = [300, 20, 299]
    for shape in (Shape(1024, 2, 0x2000, 24_576), Shape(256, 4, 0x3000, 12_288)):
        kernel = Histogram(device, bfloat16, shape)
        for view in (values, values[:, :, :, 1:-7]):
            counts = torch.zeros((4, CODES), dtype=torch.int64, device=device)
            amax = torch.zeros(4, dtype=torch.int32, device=device)
            kernel.count(view, torch.tensor(lengths, dtype=torch.int32, device=device), counts, amax, sums=True)
            expected, top = plainly(view, lengths)
            np.testing.assert_array_equal(counts.cpu().numpy(), expected)
            np.testing.assert_array_equal(amax.cpu().numpy(), top)
    single = values_of("random", 128, torch.float32, seq=100).cuda()
    mine, plain = (_observed(single, [100, 50, 3], "float16", kernel=kernel) for kernel in (True, False))
    np.testing.assert_array_equal(mine["counts"][0, "k"], plain["counts"][0, "k"])


@on_gpu
def test_what_does_not_compile_says_so():
    with pytest.raises(KernelError, match="NVRTC"):
        compiled("sm_1", macros(Shape(512, 4), half=False, wide=True, sums=True))


@on_gpu
def test_no_layer_waits_for_the_gpu_and_the_statistics_are_the_plain_paths(llama, monkeypatch):
    from dataclasses import replace

    from calibrate.collect.collector import _begin_batch

    run = collect_run(llama, rows_corpus(LENGTHS))
    run = replace(run, model=run.model.to("cuda:0", torch.bfloat16))
    observer = Observer(run.layout, CACHE_DTYPES["bfloat16"])
    _begin_batch(run, observer, run.batches[0])  # compiles the kernel
    observer.end(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in run.batches[:3]:
            _begin_batch(run, observer, batch)
            observer.close(batch.part)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert observer.settle() == []
    mine = collect(run)
    monkeypatch.setattr("calibrate.collect.observer.histogram_for", lambda *_: None)
    plain = collect(run)
    for index, kinds in mine.layers.items():
        for kind, seen in kinds.items():
            np.testing.assert_array_equal(seen.counts, plain.layers[index][kind].counts)
            np.testing.assert_array_equal(seen.part_amax, plain.layers[index][kind].part_amax)
