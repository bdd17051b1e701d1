"""The needle grid: prompts of exact length with needles at exact depths, the same for every variant, resumable."""

import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from tokenizers import decoders

from calibrate.cli import main
from calibrate.engines.session import Variant
from calibrate.engines.transformers_engine import TransformersEngine
from calibrate.errors import UsageError
from calibrate.evaluate.baselines import checkpoint_scales, unit_scales
from calibrate.evaluate.haystack import insert, read_haystack, split_sentences
from calibrate.evaluate.needle_tasks import TASKS, Hidden
from calibrate.evaluate.niah import NeedleGrid, build_grid, run_niah
from calibrate.evaluate.prompts import Prompter, stop_ids
from calibrate.evaluate.results import NeedleResult, load
from calibrate.model import SourceCheckpoint, load_tokenizer
from calibrate.model.default import default_model
from tests.evaluate.calibrated import calibrated_copy
from tests.tiny import tiny_checkpoint, tiny_tokenizer

SMALL = NeedleGrid(lengths=(600, 800), depths=(0.0, 0.5, 1.0), needles_per_cell=2)
CHAT = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"


def _tokenizer(template: str | None = None):
    """The tiny tokenizer, able to give text back."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(_tokenizer())


@pytest.fixture
def checkpoint(tmp_path):
    source = tiny_checkpoint(tmp_path / "llama", max_position_embeddings=2048)
    return calibrated_copy(source, tmp_path / "calibrated")


def _variants(checkpoint):
    scales = checkpoint_scales(SourceCheckpoint.open(checkpoint))
    return Variant("16-bit", None), Variant("unit", unit_scales(scales)), Variant("calibrated", scales)


def test_sentences():
    text = 'One. Two? "Three!" 3.14 is e.g. not an end. 第一句。第二句！“第三句？”末 Title\n\nNext\n \nLast'
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    assert [each.strip() for each in sentences] == [
        "One.", "Two?", '"Three!"', "3.14 is e.g. not an end.", "第一句。", "第二句！", "“第三句？”", "末 Title", "Next", "Last",
    ]  # fmt: skip


def test_insert_goes_to_the_nearest_border():
    pieces, sizes = ["Aa. ", "Bb.\n\n", "第三句。", "Dd."], [10, 20, 30, 40]
    for depth, text in (
        (0.0, "N. Aa. Bb.\n\n第三句。Dd."),
        (0.12, "Aa. N. Bb.\n\n第三句。Dd."),
        (0.31, "Aa. Bb.\n\nN. 第三句。Dd."),
        (0.6, "Aa. Bb.\n\n第三句。 N. Dd."),
        (1.0, "Aa. Bb.\n\n第三句。Dd. N."),
    ):
        assert insert(pieces, sizes, [Hidden("N.", depth)]) == text
    assert insert(pieces, sizes, [Hidden("N.", 0.1), Hidden("M.", 0.1)]).startswith("Aa. N. M. Bb.")
    assert insert(["第一句。", "第二句。"], [5, 5], [Hidden("针。", 0.5)]) == "第一句。针。第二句。"


@pytest.mark.parametrize("template", [None, CHAT])
def test_prompts_are_token_exact(template):
    """The length, the needle's depth in tokens, its wholeness and its sentence end, seen in the finished prompt's own tokens."""
    tokenizer = _tokenizer(template)
    prompter = Prompter(tokenizer)
    grid = NeedleGrid(lengths=(700, 1500), depths=(0.0, 0.25, 0.5, 0.75, 1.0), needles_per_cell=3, tasks=TASKS)
    asked, description = build_grid(grid, prompter)
    assert description["form"] == ("chat" if template else "plain")
    assert len(asked) == 2 * 5 * 3 * len(TASKS)
    for each in asked:
        tokens = each.request.tokens.tolist()
        assert each.length - 24 <= len(tokens) <= each.length  # each byte is a token here, and the next word may have as many
        text = tokenizer.decode(tokens)
        for hidden in each.question.hidden:
            assert text.count(hidden.statement) == 1
            before = text[: text.index(hidden.statement)]
            assert re.search(r"""[.!?。！？]["'”’)\]]*\s+$|\n\s*\n\s*$|\.\s*$""", before)
        assert each.question.question in text
        if each.task == "single":
            _check_depth(each, text, prompter)


def _check_depth(each, text: str, prompter: Prompter) -> None:
    statement = each.question.hidden[0].statement
    start = text.index("The answer stands in the text.\n\n") + len("The answer stands in the text.\n\n")
    body = text[start : text.rindex(each.question.question)].rstrip()
    body = body.removesuffix("Question:").rstrip()
    before, after = body.split(statement)
    total = prompter.count(before) + prompter.count(after)
    nearest = [0, *np.cumsum([prompter.count(piece) for piece in split_sentences(before + after.lstrip())])]
    reached = prompter.count(before)
    best = min(abs(border - each.depth * total) for border in nearest)
    assert abs(reached - each.depth * total) <= best + 4  # joined white space is all that may differ


def test_chat_templates_and_their_tokens_are_counted():
    tokenizer = _tokenizer(CHAT)
    asked, _ = build_grid(SMALL, Prompter(tokenizer))
    text = tokenizer.decode(asked[0].request.tokens.tolist())
    assert text.startswith("<s>user: Read the text")
    assert text.endswith("</s><s>assistant:")


def test_a_refusing_template_is_one_line():
    tokenizer = _tokenizer("{{ raise_exception('no questions') }}")
    with pytest.raises(UsageError, match="refuses a user's question: no questions"):
        build_grid(SMALL, Prompter(tokenizer))


def test_grids_are_deterministic_and_cells_independent(prompter):
    first, described = build_grid(SMALL, prompter)
    again, described_again = build_grid(SMALL, prompter)
    assert described == described_again
    assert all(np.array_equal(a.request.tokens, b.request.tokens) for a, b in zip(first, again, strict=True))
    other, changed = build_grid(NeedleGrid(**{**SMALL.__dict__, "seed": 1}), prompter)
    assert changed["prompts"] != described["prompts"]
    assert {each.seed for each in other}.isdisjoint(each.seed for each in first)
    fewer, _ = build_grid(NeedleGrid(**{**SMALL.__dict__, "depths": (0.5,)}), prompter)
    assert [each.question for each in fewer] == [each.question for each in first if each.depth == 0.5]
    assert len({each.question.needle for each in fewer if each.length == 600}) == 2  # no needle twice in a cell


def test_haystacks_of_the_user(tmp_path, prompter):
    (tmp_path / "folder").mkdir()
    sentence = "Rain fell on the quiet harbour all night. "
    (tmp_path / "folder" / "a.txt").write_text(sentence * 40, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": sentence * 5}) + "\n" for _ in range(20)), encoding="utf-8")
    for data in ("folder", "folder/a.txt", "rows.jsonl"):
        haystack = read_haystack(str(tmp_path / data), prompter, 900, seed=0)
        assert "".join(haystack.sentences).replace(sentence.strip(), "").isspace()
        assert haystack.tokens == sum(prompter.counts(haystack.sentences))
    asked, described = build_grid(NeedleGrid(lengths=(700,), haystack=str(tmp_path / "rows.jsonl")), prompter)
    assert described["haystack"]["data"].endswith("rows.jsonl")
    assert all(len(each.request.tokens) <= 700 for each in asked)


def test_short_haystacks(tmp_path, prompter):
    path = tmp_path / "short.txt"
    path.write_text("Rain fell on the quiet harbour. All night long it fell. " * 3, encoding="utf-8")
    grid = NeedleGrid(lengths=(700,), depths=(0.5,), haystack=str(path))
    with pytest.raises(UsageError, match=r"too few for a prompt of 700: .*--repeat-haystack"):
        build_grid(grid, prompter)
    asked, described = build_grid(NeedleGrid(**{**grid.__dict__, "repeat_haystack": True}), prompter)
    assert described["repeat_haystack"] is True
    assert all(680 < len(each.request.tokens) <= 700 for each in asked)


def test_a_haystack_with_the_answer_is_refused(tmp_path, prompter):
    path = tmp_path / "told.txt"
    path.write_text("Everybody knows Quimbett, Teodor Abernick, 7391 and 2649. " * 60, encoding="utf-8")
    with pytest.raises(UsageError, match="stands in the haystack"):
        build_grid(NeedleGrid(lengths=(700,), needles_per_cell=26, depths=(0.5,), haystack=str(path)), prompter)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lengths": ()}, "lengths must be some"),
        ({"depths": ()}, "depths must be some"),
        ({"tasks": ()}, "tasks must be some"),
        ({"languages": ()}, "languages must be some"),
        ({"lengths": (600, 600)}, "each once"),
        ({"needles_per_cell": 0}, "empty needle grid"),
        ({"tasks": ("triple",)}, "no needle task 'triple'"),
        ({"depths": (1.5,)}, "from 0"),
        ({"seed": -1}, "--seed"),
        ({"lengths": (2048,)}, "exceed the model's context of 2,048"),
        ({"lengths": (100,)}, "has no room"),
        ({"languages": ("tlh",)}, "en, zh"),
        ({"haystack": "random"}, "no sentences"),
        ({"haystack": "/nowhere.txt"}, "no such file"),
    ],
)
def test_bad_grids_are_one_line(checkpoint, change, says):
    grid = NeedleGrid(**{**SMALL.__dict__, **change})
    engine = TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32")
    with pytest.raises(UsageError) as caught:
        run_niah(checkpoint, engine, _variants(checkpoint), grid)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (checkpoint / "kv_calibration" / "evidence").exists()


class _Killed(Exception):
    pass


class _Dying:
    """A real session that is killed after so many calls."""

    def __init__(self, engine: TransformersEngine, calls: int) -> None:
        self._engine, self.left = engine, calls

    def session(self, variant):
        dying = self

        class Manager:
            def __enter__(self):
                self.context = dying._engine.session(variant)
                session = self.context.__enter__()
                generate = session.generate

                def counted(*arguments):
                    if dying.left == 0:
                        raise _Killed
                    dying.left -= 1
                    return generate(*arguments)

                session.generate = counted
                return session

            def __exit__(self, *error):
                return self.context.__exit__(*error)

        return Manager()


def test_a_killed_run_goes_on_to_the_same_file(checkpoint):
    grid = NeedleGrid(lengths=(600,), depths=(0.0, 1.0), needles_per_cell=2)
    engine = TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32")
    whole = run_niah(checkpoint, engine, _variants(checkpoint), grid)
    path = checkpoint / "kv_calibration" / "evidence" / "niah-transformers.json"
    expected = path.read_bytes()
    assert load(NeedleResult, path) == whole
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    path.unlink()

    with pytest.raises(_Killed):
        run_niah(checkpoint, _Dying(engine, 6), _variants(checkpoint), grid)
    assert not path.exists()
    journal = path.with_name(".niah-transformers.unit.jsonl")
    lines = journal.read_bytes()
    assert lines.count(b"\n") == 1 + 2
    journal.write_bytes(lines[:-20])  # the kill came in the middle of a line

    rest = _Dying(engine, 1000)
    run_niah(checkpoint, rest, _variants(checkpoint), grid)
    assert 1000 - rest.left == 12 - 6 + 1  # only what was missing, and the broken line
    assert path.read_bytes() == expected
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_another_plan_starts_over(checkpoint):
    engine = TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32")
    grid = NeedleGrid(lengths=(600,), depths=(0.5,), needles_per_cell=3)
    with pytest.raises(_Killed):
        run_niah(checkpoint, _Dying(engine, 2), _variants(checkpoint)[:1], grid)
    rest = _Dying(engine, 1000)
    run_niah(checkpoint, rest, _variants(checkpoint)[:1], NeedleGrid(**{**grid.__dict__, "seed": 4}))
    assert 1000 - rest.left == 3


def test_variants_are_some_each_once(checkpoint):
    engine = TransformersEngine(SourceCheckpoint.open(checkpoint), device="cpu", dtype="float32")
    for variants in ((), (Variant("16-bit", None), Variant("16-bit", None))):
        with pytest.raises(UsageError, match="each once"):
            run_niah(checkpoint, engine, variants, SMALL)


def test_command(checkpoint, tmp_path):
    arguments = ["niah", str(checkpoint), "--lengths", "600", "--depths", "0,1", "--needles", "1", "--dtype", "float32", "--device", "cpu"]
    done = CliRunner().invoke(main, [*arguments, "--variants", "16-bit,random,calibrated", "--heatmaps", str(tmp_path / "maps"), "--json"])
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert [row["variant"] for row in shown["variants"]] == ["16-bit", "random", "calibrated"]
    assert shown["variants"][1]["against_16_bit"]["neither"] == 2
    assert len(shown["heatmaps"]) == 4
    result = load(NeedleResult, checkpoint / "kv_calibration" / "evidence" / "niah-transformers.json")
    assert len(result.variants[0].cells) == 2
    for wrong, says in (
        (["--lengths", "a"], "whole numbers"),
        (["--variants", "best"], "each once, are wanted"),
        (["--tensor-parallel-size", "2"], "not for --engine transformers"),
        (["--lengths", ""], "lengths must be some"),
    ):
        failed = CliRunner().invoke(main, [*arguments, *wrong])
        assert failed.exit_code == 2
        assert says in failed.stderr


@pytest.mark.weights
def test_a_real_model_finds_needles():
    """SmolLM2-135M-Instruct with its 16-bit cache, greedily, at 512 tokens."""
    source = SourceCheckpoint.open(default_model())
    tokenizer = load_tokenizer(source)
    prompter = Prompter(tokenizer)
    asked, _ = build_grid(NeedleGrid(lengths=(512,), depths=(0.1, 0.5, 0.9), needles_per_cell=2), prompter)
    assert all(500 <= len(each.request.tokens) <= 512 for each in asked)
    with TransformersEngine(source, device="cpu").session(Variant("16-bit", None)) as session:
        stop = stop_ids(source.path, tokenizer)
        outputs = [session.generate([each.request.tokens.tolist()], each.request.max_new_tokens, stop)[0] for each in asked]
    cells = [each.cell(prompter.decode(output), plain=False) for each, output in zip(asked, outputs, strict=True)]
    assert sum(cell.hit for cell in cells) >= 4, [cell.output for cell in cells]
