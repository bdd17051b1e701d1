"""lm-eval's harness on our sessions: log-likelihoods as transformers gives them, answers cut at stop strings, the same requests with every cache."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from calibrate.cli import main
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate.results import LmEvalResult, load
from calibrate.model import SourceCheckpoint
from tests.evaluate.calibrated import calibrated_copy
from tests.tiny import tiny_checkpoint

DOCUMENTS = [
    {"question": "The first", "choices": [" apple", " pear tree", " fig"], "answer": 1},
    {"question": "Second, longer", "choices": [" one", " two", " three"], "answer": 0},
    {"question": "Third?", "choices": ["a", "bb", "ccc"], "answer": 2},
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
ANSWER = """
task: tiny_answer
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
metadata: {version: 2.0}
"""


def harness():
    pytest.importorskip("lm_eval.tasks", reason="the extra lm-eval is not installed")
    return sys.modules["lm_eval"]


@pytest.fixture(autouse=True)
def local_data(monkeypatch, tmp_path):
    """Data sets are built in a folder of the test's own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm-eval")
    return calibrated_copy(tiny_checkpoint(folder / "llama", dtype=torch.float32), folder / "calibrated")


@pytest.fixture
def tasks(tmp_path):
    """A folder with two tasks over one JSONL file."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS), encoding="utf-8")
    for name, text in (("choice", CHOICE), ("answer", ANSWER)):
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder / "data.jsonl")), encoding="utf-8")
    return folder


@pytest.fixture
def engine(checkpoint):
    return TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32")


@pytest.fixture
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint.parent / "llama", dtype=torch.float32).eval()


@pytest.fixture
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


class Rounded(DynamicCache):
    """What a 16-bit cache keeps of a float32 model."""

    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.bfloat16().float(), value_states.bfloat16().float(), *args, **kwargs)


def log_probs(model, tokens):
    """Transformers' own, of every token but the first, and the likeliest ones: [tokens − 1] each."""
    with torch.inference_mode():
        scores = model(torch.tensor([tokens]), past_key_values=Rounded()).logits[0, :-1].double().log_softmax(-1)  # [tokens − 1, vocab]
    return scores.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], scores.argmax(-1)


def session_lm(session, tokenizer, limit=512):
    from calibrate.evaluate.lm_eval_model import SessionLM

    return SessionLM(session, tokenizer, [2], limit=limit, batch=2, label="test")


def asked(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def test_log_likelihoods_are_transformers_own(engine, model, tokenizer):
    harness()
    pairs = [("The first:", " apple"), ("The first:", " pear tree"), ("trailing  ", "space"), ("", "no context")]
    with engine.session(Variant("16-bit", None)) as session:
        found = session_lm(session, tokenizer).loglikelihood(asked(*pairs))
        start = tokenizer("The first:")["input_ids"]
        best = session.generate([start], 4, [2])[0]  # byte tokens that are no text: as tokens
        (_, is_greedy), (_, is_not) = session_lm(session, tokenizer)._loglikelihood_tokens([(None, start, best), (None, start, [*best[:3], 3, 4])])
    assert (is_greedy, is_not) == (True, False)
    pairs[2] = ("trailing", "  space")  # lm-eval counts spaces before a word to the word
    for (context, continuation), (value, chosen) in zip(pairs, found, strict=True):
        start = tokenizer(context)["input_ids"] if context else [tokenizer.bos_token_id]
        tokens = [*start, *tokenizer(continuation, add_special_tokens=False)["input_ids"]]
        expected, likeliest = log_probs(model, tokens)
        assert value == pytest.approx(expected[len(start) - 1 :].sum().item(), abs=1e-4)
        assert chosen is bool((likeliest[len(start) - 1 :] == torch.tensor(tokens[len(start) :])).all())


def test_long_texts_are_scored_in_windows_each_token_once(engine, model, tokenizer):
    harness()
    text = "a text that is longer than its window"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    with engine.session(Variant("16-bit", None)) as session:
        whole, cut = (session_lm(session, tokenizer, limit).loglikelihood_rolling(asked((text,)))[0] for limit in (512, 16))
    bos = tokenizer.bos_token_id
    assert whole == pytest.approx(log_probs(model, [bos, *tokens])[0].sum().item(), abs=1e-4)
    expected = log_probs(model, [bos, *tokens[:15]])[0].sum()
    for start in range(15, len(tokens), 15):
        end = min(start + 15, len(tokens))
        expected += log_probs(model, tokens[end - 16 : end])[0][15 - (end - start) :].sum()
    assert cut == pytest.approx(expected.item(), abs=1e-4)


def test_answers_end_at_stop_strings_and_long_prompts_lose_their_beginning(engine, tokenizer):
    harness()
    settings = {"until": [], "max_gen_toks": 6, "do_sample": False}
    with engine.session(Variant("16-bit", None)) as session:
        [plain] = session_lm(session, tokenizer).generate_until(asked(("The first:", settings)))
        assert len(plain) >= 3
        [stopped] = session_lm(session, tokenizer).generate_until(asked(("The first:", settings | {"until": [plain[2]]})))
        assert stopped == plain.split(plain[2])[0]
        short = session_lm(session, tokenizer, limit=10)
        assert short.generate_until(asked(("Something before: The first:", settings))) == short.generate_until(asked(("rst:", settings)))
        assert (short.truncated, short.longest) == (1, 10)
        with pytest.raises(UsageError, match="sampled"):
            short.generate_until(asked(("a", settings | {"do_sample": True, "temperature": 0.5})))
        with pytest.raises(UsageError, match="do not fit"):
            short.generate_until(asked(("a", settings | {"max_gen_toks": 10})))


def test_a_run_is_kept_is_repeatable_and_goes_on_after_a_kill(checkpoint, engine, model, tokenizer, tasks, monkeypatch):
    harness()
    from calibrate.evaluate import lm_eval_tasks

    def run():
        variants = (Variant("16-bit", None), Variant("again", None))
        return lm_eval_tasks.run_lm_eval(checkpoint, engine, variants, ("tiny_choice", "tiny_answer"), include_path=tasks)

    opened = []

    def killed(result, path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lm_eval_tasks, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            run()
    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "score", opened.append, raising=False)
        patch.setattr("calibrate.engines.transformers_engine.TransformersSession.score", opened.append)
        result = run()
    assert not opened  # both variants came from the journal
    path = checkpoint / "kv_calibration" / "evidence" / "lm-eval-transformers.json"
    assert load(LmEvalResult, path) == result == run()
    assert [path.name for path in path.parent.glob(".*")] == []
    assert result.variants[0].tasks == result.variants[1].tasks
    choice, answer = sorted(result.variants[0].tasks, key=lambda each: each.task, reverse=True)
    assert (choice.task, choice.version, choice.documents, choice.shots) == ("tiny_choice", "1.0", 3, 0)
    assert (answer.task, answer.version, answer.documents) == ("tiny_answer", "2.0", 3)
    right = []
    for each in DOCUMENTS:
        start = tokenizer(f"{each['question']}:")["input_ids"]
        sums = [
            log_probs(model, start + tokenizer(word, add_special_tokens=False)["input_ids"])[0][len(start) - 1 :].sum() for word in each["choices"]
        ]
        right.append(max(range(3), key=sums.__getitem__) == each["answer"])
    metric = next(each for each in choice.metrics if each.metric == "acc")
    share = sum(right) / 3
    assert metric.value == pytest.approx(share)
    assert metric.stderr == pytest.approx((share * (1 - share) / 2) ** 0.5)
    assert metric.higher_is_better


def test_command(checkpoint, tasks, monkeypatch):
    manager = harness().tasks.TaskManager
    # without lm-eval's own 14,000 files, which take many seconds to read
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_path=None, include_defaults=True: manager(None, include_path, False))
    arguments = ["lm-eval", str(checkpoint), "--include-path", str(tasks), "--device", "cpu", "--dtype", "float32"]
    done = CliRunner().invoke(main, [*arguments, "--tasks", "tiny_choice,tiny_answer", "--limit", "2", "--json"])
    assert done.exit_code == 0, (done.stderr, done.exception)
    shown = json.loads(done.stdout)
    assert [row["variant"] for row in shown["variants"]] == ["16-bit", "unit", "calibrated"]
    assert {task["documents"] for row in shown["variants"] for task in row["tasks"]} == {2}
    table = CliRunner().invoke(main, [*arguments, "--tasks", "tiny_choice", "--variants", "16-bit,calibrated"])
    assert table.exit_code == 0, table.stderr
    assert "tiny_choice" in table.stdout
    assert "±" in table.stdout
    broken = tasks / "broken.yaml"
    broken.write_text(CHOICE.replace("tiny_choice", "broken").replace("DATA", str(tasks / "absent.jsonl")), encoding="utf-8")
    for words, message in (
        (["--tasks", "chess_of_the_moon"], "lm-eval has no task chess_of_the_moon"),
        (["--tasks", ""], "some tasks, each once"),
        (["--tasks", "tiny_choice", "--limit", "0"], "at least 1"),
        (["--tasks", "tiny_choice", "--include-path", str(tasks / "none")], "no such folder"),
        (["--tasks", "broken"], "lm-eval cannot run broken: FileNotFoundError"),
    ):
        failed = CliRunner().invoke(main, [*arguments, *words])
        assert failed.exit_code == 2, (words, failed.stderr, failed.exception)
        assert message in failed.stderr


def test_without_the_extra_the_host_cannot(checkpoint, monkeypatch):
    for name in [name for name in sys.modules if name.startswith(("lm_eval", "calibrate.evaluate.lm_eval"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    failed = CliRunner().invoke(main, ["lm-eval", str(checkpoint), "--tasks", "arc_easy"])
    assert failed.exit_code == 3
    assert "kv-calibrate[lm-eval]" in failed.stderr
    assert failed.stderr.count("\n") == 1
