"""Answers that grow together: each is what it would be alone, whatever the cache, and models that cannot do it are taken one by one."""

from contextlib import contextmanager

import pytest
import torch

from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.lowbit import make_format
from calibrate.model import SourceCheckpoint
from tests.engines.test_transformers_engine import rows, scales_for
from tests.tiny import FAMILIES, tiny_checkpoint

FORMATS = ["fp8_e4m3", "int4_per_token_head", "kivi_2bit", "kvarn_k2v2_g64", "turboquant_3bit_nc", "turboquant_paper_3bit"]


def open_engine(folder, family: str = "llama", dtype: str = "float32", **sizes) -> TransformersEngine:
    return TransformersEngine(SourceCheckpoint.open(tiny_checkpoint(folder / family, family, **sizes)), device="cpu", dtype=dtype, block=64)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return open_engine(tmp_path_factory.mktemp("lockstep"), num_hidden_layers=6)


def variants(engine) -> list[Variant]:
    fp8 = Variant("fp8 with queries", scales_for(engine, k=0.25, v=0.25, q=0.25))
    return [Variant("16-bit", None), fp8, *(Variant(name, None, make_format(name)) for name in FORMATS)]


@contextmanager
def one_by_one(session):
    """The session as of a model that cannot."""
    before, session._lockstep.possible = session._lockstep.possible, False
    yield session
    session._lockstep.possible = before


@pytest.mark.parametrize("number", range(2 + len(FORMATS)))
def test_together_as_alone(engine, number):
    """Prompts of several lengths, two with a prefix of whole blocks in common, answers that stop early: the same tokens."""
    prompts = rows([150, 201, 1, 190, 130], seed=3)
    prompts.append(prompts[1][:128] + prompts[4][:30])
    with engine.session(variants(engine)[number]) as session:
        assert session._lockstep.possible
        free = session.generate(prompts, 70, ())  # over the end of a group of 64
        stop = free[0][5]
        stopped = session.generate(prompts, 70, (stop,))
        with one_by_one(session):
            alone = session.generate(prompts, 70, ())
            alone_stopped = session.generate(prompts, 70, (stop,))
        assert session.generate([], 70, ()) == []
        assert session.generate(prompts, 0, ()) == [[]] * len(prompts)
    assert free == alone
    assert {len(answer) for answer in free} == {70}
    assert stopped == alone_stopped
    assert len(stopped[0]) == free[0].index(stop)


@pytest.mark.parametrize("name", FORMATS)
def test_a_step_leaves_the_caches_that_steps_alone_leave(engine, name):
    """Logits to the rounding of float32, and the same numbers of quantized tokens."""
    with engine.session(Variant(name, None, make_format(name))) as session, torch.inference_mode():
        caches = [session._started(prompt)[1] for prompt in rows([127, 150, 64], seed=4)]
        twins = [cache.fork() for cache in caches]
        got = session._lockstep.step([5, 6, 7], caches)
        expected = torch.cat([session._forward(session._one([token]), twin).logits[0] for token, twin in zip([5, 6, 7], twins, strict=True)])
    assert torch.allclose(got, expected, atol=1e-4)
    for cache, twin in zip(caches, twins, strict=True):
        assert cache.quantized_tokens() == twin.quantized_tokens()
        assert cache.get_seq_length() == twin.get_seq_length()
        for ours, theirs in zip(cache.layers, twin.layers, strict=True):
            assert ours.keys.shape == theirs.keys.shape
            assert float((ours.values - theirs.values).abs().median()) < 1e-5


def test_sixteen_bit_attention_of_one_query_is_near(tmp_path):
    """In bf16 the single query attends in float32: logits differ by the rounding of bf16 alone."""
    engine = open_engine(tmp_path, dtype="bfloat16")
    with engine.session(Variant("16-bit", None)) as session, torch.inference_mode():
        (_, cache), row = session._started(rows([150])[0]), rows([40], seed=5)[0]
        twin, apart = cache.fork(), []
        for token in row:
            expected = session._forward(session._one([token]), twin).logits[0].float()
            apart.append(float((session._lockstep.step([token], [cache])[0].float() - expected).abs().max() / expected.abs().max()))
    assert max(apart) < 0.03


def test_forks_grow_alone(engine):
    with engine.session(Variant("x", None, make_format("kvarn_k2v2_g64"))) as session, torch.inference_mode():
        _, cache = session._started(rows([190])[0])
        before = [layer.keys for layer in cache.layers]
        twin = cache.fork()
        for token in range(3, 8):
            session._forward(session._one([token]), twin)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (190, 195)
    assert all(layer.keys is keys for layer, keys in zip(cache.layers, before, strict=True))
    assert not cache.quantized_tokens()
    assert twin.quantized_tokens()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family, tmp_path):
    """Together where the model can, one by one elsewhere: the same answers."""
    engine = open_engine(tmp_path, family)
    prompts = rows([70, 33, 5], seed=6)
    with engine.session(Variant("16-bit", None)) as session:
        possible, together = session._lockstep.possible, session.generate(prompts, 8, ())
        with one_by_one(session):
            assert session.generate(prompts, 8, ()) == together
    special = any(layer.sliding_window or layer.latent or not layer.writes for layer in engine.layout.layers)
    assert not (possible and special)
    assert possible or family != "llama"
