"""The judge: what it calls right, wrong, refused, crashed and hung, and how it writes that down."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import psutil
import pytest
import torch
from safetensors.torch import save_file

from fixtures.__main__ import main
from fixtures.case import Case, Exact, Outcome, Refused
from fixtures.cases import CASES
from fixtures.conformance import Judgement, Suite, cache
from fixtures.conformance.page import BEGIN, END, write_scores
from fixtures.conformance.report import Score, read_json, rows, totals, write_json, write_junit
from fixtures.conformance.running import Ran, run
from fixtures.conformance.suite import matching
from fixtures.conformance.verdicts import judged
from fixtures.conformance.weights import DtypePolicy, Tensors, differences, has_weights, read_weights
from fixtures.mentions import rank

WEIGHT = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.1]])
# A third is rounded by each of the narrower dtypes.
THIRD = torch.tensor([1 / 3, float("nan"), -0.0])


def python(source: str) -> str:
    return f"{sys.executable} -c '{source}' {{ckpt}} {{out}}"


class TestDifferences:
    """Bit for bit what was trained, or that rounded to one dtype."""

    def test_equal_tensors_have_none(self) -> None:
        tensors = {"a": WEIGHT, "b": THIRD, "n": torch.tensor(2**53 + 1), "z": torch.zeros(0, 4)}
        assert differences({name: tensor.clone() for name, tensor in tensors.items()}, tensors) == []

    def test_missing_and_superfluous_names_are_counted(self) -> None:
        assert differences({"c": WEIGHT}, {"a": WEIGHT, "b": WEIGHT}) == [
            "2 tensors are missing: a and 1 more",
            "1 tensor is too many: c",
        ]

    def test_the_first_element_that_differs_is_named(self) -> None:
        found = WEIGHT.clone()
        found[1, 0] = found[1, 2] = 0.0
        assert differences({"a": found}, {"a": WEIGHT}) == ["a: 2 of 6 elements differ, the first at [1, 0]"]

    def test_a_shape_that_differs_is_named(self) -> None:
        assert differences({"a": WEIGHT.reshape(3, 2)}, {"a": WEIGHT}) == ["a: shape (3, 2) instead of (2, 3)"]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_cast_is_compared_with_the_rounded_truth(self, dtype: torch.dtype) -> None:
        """S13."""
        assert differences({"a": THIRD.to(dtype)}, {"a": THIRD}) == []
        off = THIRD.to(dtype).clone()
        off[0] = 0.25
        assert differences({"a": off}, {"a": THIRD}) == ["a: 1 of 3 elements differ, the first at [0]"]

    def test_zeros_of_another_sign_differ_even_after_a_cast(self) -> None:
        found = torch.tensor([0.0]).bfloat16()
        assert differences({"a": found}, {"a": torch.tensor([-0.0])}) == ["a: 1 of 1 elements differ, the first at [0]"]

    def test_without_a_cast_the_bits_of_a_nan_count(self) -> None:
        """S4."""
        nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
        assert differences({"a": nan.clone()}, {"a": nan}) == []
        assert differences({"a": torch.tensor([float("nan")])}, {"a": nan}) == [
            "a: 1 of 1 elements differ, the first at [0]"
        ]

    def test_after_a_cast_one_nan_is_as_good_as_another(self) -> None:
        nan = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
        assert differences({"a": nan}, {"a": torch.tensor([float("nan")])}) == []

    def test_tensors_are_cast_to_one_dtype_or_kept(self) -> None:
        expected = {"a": THIRD, "b": THIRD, "c": THIRD}
        assert differences({"a": THIRD.half(), "b": THIRD.half(), "c": THIRD}, expected) == []
        assert differences({"a": THIRD.half(), "b": THIRD.bfloat16(), "c": THIRD}, expected) == [
            "tensors were cast to torch.bfloat16 and torch.float16, not all to one dtype"
        ]

    @pytest.mark.parametrize(
        ("policy", "dtype", "wrong"),
        [
            ("any", torch.bfloat16, []),
            ("keep", torch.bfloat16, ["a: bfloat16 instead of float32"]),
            ("bf16", torch.bfloat16, []),
            ("bf16", torch.float32, ["a: float32 instead of float32"]),
            ("any", torch.float64, ["a: float64 instead of float32"]),
        ],
    )
    def test_the_policy_says_which_casts_are_allowed(
        self, policy: DtypePolicy, dtype: torch.dtype, wrong: list[str]
    ) -> None:
        assert differences({"a": THIRD.to(dtype)}, {"a": THIRD}, policy=policy) == wrong

    @pytest.mark.parametrize("policy", ["any", "keep", "bf16"])
    def test_integers_bools_and_complex_numbers_are_never_cast(self, policy: DtypePolicy) -> None:
        """S13."""
        expected = {"n": torch.tensor([255, 256]), "m": torch.tensor([True]), "z": torch.tensor([1j])}
        found = {"n": torch.tensor([255.0, 256.0]).bfloat16(), "m": torch.tensor([1.0]), "z": torch.tensor([0.0])}
        assert differences(found, expected, policy=policy)[:3] == [
            "n: bfloat16 instead of int64",
            "m: float32 instead of bool",
            "z: float32 instead of complex64",
        ]

    def test_quantised_weights_may_stay_as_they_are_where_all_must_be_bfloat16(self) -> None:
        quantised = torch.tensor([1.0]).to(torch.float8_e4m3fn)
        assert differences({"q": quantised.clone()}, {"q": quantised}, policy="bf16") == []

    def test_an_alias_may_be_left_out_only_where_it_is_equal(self) -> None:
        """S12."""
        ties = (("head", "embedding"),)
        both = {"head": WEIGHT, "embedding": WEIGHT.clone()}
        assert differences({"embedding": WEIGHT}, both, ties=ties) == []
        assert differences({"head": WEIGHT}, both, ties=ties) == ["1 tensor is missing: embedding"]
        apart = {"head": WEIGHT + 1, "embedding": WEIGHT}
        assert differences({"embedding": WEIGHT}, apart, ties=ties) == ["1 tensor is missing: head"]

    def test_an_alias_must_be_left_out_where_it_is_to_be_written_once(self) -> None:
        """S12."""
        ties, both = (("head", "embedding"),), {"head": WEIGHT, "embedding": WEIGHT.clone()}
        assert differences({"embedding": WEIGHT}, both, ties=ties, once=True) == []
        wrong = ["head: is written again, though it is tied to what equals it"]
        assert differences(both, both, ties=ties, once=True) == wrong
        assert differences(both, both, ties=ties) == []
        apart = {"head": WEIGHT + 1, "embedding": WEIGHT}
        assert differences(apart, apart, ties=ties, once=True) == []

    @pytest.mark.parametrize("policy", ["any", "keep", "bf16"])
    def test_what_the_architecture_keeps_is_never_cast(self, policy: DtypePolicy) -> None:
        """S13."""
        expected = {"bias": WEIGHT, "w": WEIGHT.bfloat16()}
        assert differences(expected, expected, kept=["bias"], policy=policy) == []
        rounded = {"bias": WEIGHT.bfloat16(), "w": WEIGHT.bfloat16()}
        wrong = ["bias: bfloat16 instead of float32"]
        assert differences(rounded, expected, kept=["bias"], policy=policy) == wrong
        assert differences(rounded, expected) == []

    def test_another_order_of_additions_is_allowed_only_where_that_is_said(self) -> None:
        nearly = WEIGHT * (1 + 1e-6)
        assert differences({"a": nearly}, {"a": WEIGHT}, close=True) == []
        assert differences({"a": nearly}, {"a": WEIGHT}) != []
        assert differences({"a": WEIGHT * 1.001}, {"a": WEIGHT}, close=True) != []


class TestReadWeights:
    """What safetensors finds at OUT itself."""

    def test_one_file(self, tmp_path: Path) -> None:
        save_file({"a": WEIGHT}, tmp_path / "model.safetensors", {"format": "pt"})
        tensors, wrong = read_weights(tmp_path)
        assert (list(tensors), wrong) == (["a"], [])

    def test_nothing_is_no_model(self, tmp_path: Path) -> None:
        assert read_weights(tmp_path) == ({}, ["no weights in safetensors files at OUT"])

    def test_a_file_that_is_cut_or_has_no_format_is_named(self, tmp_path: Path) -> None:
        """S18."""
        save_file({"a": WEIGHT}, tmp_path / "a.safetensors")
        (tmp_path / "b.safetensors").write_bytes(b"12345")
        _, wrong = read_weights(tmp_path)
        assert wrong[0] == 'a.safetensors: its metadata lacks "format": "pt"'
        assert wrong[1].startswith("b.safetensors: ")

    @pytest.mark.parametrize(
        ("total", "second", "wrong"),
        [
            (36, "2.safetensors", []),
            (9, "2.safetensors", ["total_size is not the 36 bytes that the tensors have"]),
            (36, "1.safetensors", ["does not say which tensor is in which file"]),
        ],
    )
    def test_an_index_must_be_true(self, total: int, second: str, wrong: list[str], tmp_path: Path) -> None:
        """S18."""
        for name, tensor in (("1", WEIGHT), ("2", THIRD)):
            save_file({name: tensor}, tmp_path / f"{name}.safetensors", {"format": "pt"})
        index = {"metadata": {"total_size": total}, "weight_map": {"1": "1.safetensors", "2": second}}
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps(index))
        assert read_weights(tmp_path)[1] == [f"{path.name}: {fault}" for fault in wrong]

    def test_several_files_need_an_index(self, tmp_path: Path) -> None:
        for name in ("1", "2"):
            save_file({name: WEIGHT}, tmp_path / f"{name}.safetensors", {"format": "pt"})
        assert read_weights(tmp_path)[1] == ["2 files of weights, but no model.safetensors.index.json"]

    @pytest.mark.parametrize(("beside", "wrong"), [("v_head.w", 0), ("head.w", 1)])
    def test_a_value_head_may_lie_beside_a_model_without_an_index(
        self, beside: str, wrong: int, tmp_path: Path
    ) -> None:
        """S20: what has no place in the model is no part of its index."""
        save_file({"1": WEIGHT}, tmp_path / "model.safetensors", {"format": "pt"})
        save_file({beside: WEIGHT}, tmp_path / "value_head.safetensors", {"format": "pt"})
        tensors, found = read_weights(tmp_path)
        assert ({*tensors}, len(found)) == ({"1", beside}, wrong)

    def test_weights_of_any_kind_are_seen_in_folders_too(self, tmp_path: Path) -> None:
        assert not has_weights(tmp_path)
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "pytorch_model.bin").touch()
        assert has_weights(tmp_path)


def case_of(*expected: Outcome, fault: str | None = None) -> Case:
    return replace(CASES["tensors-bools"], fault=fault, expected=expected)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "made" / "truth").mkdir(parents=True)
    save_file({"a": WEIGHT}, tmp_path / "made" / "truth" / "truth.safetensors")
    return tmp_path / "made"


def verdict(case: Case, ran: Ran, made: Path, weights: Tensors | None = None) -> tuple[str, str]:
    out = made.parent / "out"
    out.mkdir(exist_ok=True)
    if weights is not None:
        save_file(weights, out / "model.safetensors", {"format": "pt"})
    judgement = judged(case, ran, out, made, "any")
    return judgement.verdict, judgement.reason


class TestVerdicts:
    """Six ways to end."""

    def test_the_right_model_is_right(self, made: Path) -> None:
        assert verdict(case_of(Exact()), Ran(0, "", 1.0), made, {"a": WEIGHT}) == ("right", "")

    def test_another_model_is_wrong_silently(self, made: Path) -> None:
        reason = "a: 6 of 6 elements differ, the first at [0, 0]"
        assert verdict(case_of(Exact()), Ran(0, "", 1.0), made, {"a": WEIGHT + 1}) == ("wrong silently", reason)

    def test_success_without_a_model_is_wrong_silently(self, made: Path) -> None:
        reason = "no weights in safetensors files at OUT"
        assert verdict(case_of(Exact()), Ran(0, "done", 1.0), made) == ("wrong silently", reason)

    def test_any_one_of_the_models_that_are_expected_is_right(self, made: Path) -> None:
        save_file({"b": WEIGHT}, made / "truth" / "folded.safetensors")
        case = case_of(Refused(("lora",)), Exact("folded"), Exact())
        assert verdict(case, Ran(0, "", 1.0), made, {"a": WEIGHT}) == ("right", "")

    def test_a_model_where_a_refusal_is_due_is_wrong_silently(self, made: Path) -> None:
        case = case_of(Refused(("rank 1",)), fault="rank_zero_missing")
        reason = "exit code 0, but: Rank 0 is gone, the one that some mergers read first."
        assert verdict(case, Ran(0, "", 1.0), made, {"a": WEIGHT}) == ("wrong silently", reason)

    def test_a_refusal_that_mentions_everything_is_right(self, made: Path) -> None:
        case = case_of(Refused((rank(1), "GATE")))
        text = "Traceback ...\nFileNotFoundError: model_world_size_4_rank_1.pt, for gate_proj\n"
        assert verdict(case, Ran(1, text, 1.0), made) == ("refused rightly", "")

    def test_frames_of_a_traceback_mention_nothing(self, made: Path) -> None:
        frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in merge\n    merge(rank_1, gate)\n'
        ran = Ran(1, f"{frames}KeyError: 3\n  the key of rank 1\n", 1.0)
        assert verdict(case_of(Refused(("gate",))), ran, made)[0] == "refused wrongly"
        assert verdict(case_of(Refused((rank(1), "keyerror"))), ran, made) == ("refused rightly", "")

    def test_a_refusal_that_lacks_a_word_is_wrong(self, made: Path) -> None:
        reason = "does not mention gate or rank 12; exit code 1: KeyError: 3"
        assert verdict(
            case_of(Refused((rank(1), f"gate|{rank(12)}"))), Ran(1, "rank 1\nKeyError: 3\n\n", 1.0), made
        ) == (
            "refused wrongly",
            reason,
        )

    def test_a_refusal_that_leaves_weights_is_wrong(self, made: Path) -> None:
        """L9."""
        reason = "left weights at OUT; exit code 1: rank 1 is bad"
        assert verdict(case_of(Refused((rank(1),))), Ran(1, "rank 1 is bad", 1.0), made, {"a": WEIGHT}) == (
            "refused wrongly",
            reason,
        )

    def test_a_refusal_of_what_is_sound_is_wrong(self, made: Path) -> None:
        reason = "exit code 3: nothing was said"
        assert verdict(case_of(Exact()), Ran(3, "", 1.0), made) == ("refused wrongly", reason)

    def test_a_signal_is_a_crash(self, made: Path) -> None:
        assert verdict(case_of(Refused(("a",))), Ran(-11, "a", 1.0), made) == ("crashed", "killed by SIGSEGV")

    def test_no_end_is_a_hang(self, made: Path) -> None:
        assert verdict(case_of(Exact()), Ran(None, "", 7.0), made) == ("hung", "had not ended after 7 s")

    def test_to_run_what_a_file_holds_is_wrong_even_if_it_is_refused_afterwards(self, made: Path) -> None:
        """L11."""
        ran = Ran(1, "system", 1.0, has_run_code=True)
        assert verdict(case_of(Refused(("system",))), ran, made) == (
            "wrong silently",
            "ran the code that was in a rank file",
        )


@pytest.mark.parametrize("text", ["rank 2", "Rank: 2", "ranks 0, 1 and 2", "x_rank_2.pt", "ranks 1-2", "ranks 2-3"])
def test_a_rank_is_mentioned_by_its_number(text: str, made: Path) -> None:
    assert verdict(case_of(Refused((rank(2),))), Ran(1, text, 1.0), made)[0] == "refused rightly"


@pytest.mark.parametrize("text", ["rank 12", "ranks 20", "world size 2", "2 ranks"])
def test_another_number_is_not_that_of_the_rank(text: str, made: Path) -> None:
    assert verdict(case_of(Refused((rank(2),))), Ran(1, text, 1.0), made)[0] == "refused wrongly"


class TestRun:
    """A command, its time, and all that it started."""

    def test_both_streams_and_the_exit_code_are_kept_without_the_paths(self, tmp_path: Path) -> None:
        source = 'import sys; print(sys.argv[1:]); print("bad", file=sys.stderr); sys.exit(4)'
        ran = run(python(source), Path("c k"), tmp_path / "out", limit=60.0)
        assert ran.exit_code == 4
        assert sorted(ran.output.splitlines()) == ["['CKPT', 'OUT']", "bad"]
        assert not ran.has_run_code

    def test_what_hangs_is_ended_with_its_children(self, tmp_path: Path) -> None:
        pid = tmp_path / "pid"
        child = f'import os, time; open("{pid}", "w").write(str(os.getpid())); time.sleep(600)'
        script = tmp_path / "hang.py"
        script.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', '''{child}'''])\n")
        ran = run(f"{sys.executable} {script} {{ckpt}} {{out}}", tmp_path, tmp_path / "out", limit=3.0)
        assert ran.exit_code is None
        assert pid.exists()
        begin = time.monotonic()
        while psutil.pid_exists(int(pid.read_text())) and time.monotonic() - begin < 60:
            time.sleep(0.05)
        assert not psutil.pid_exists(int(pid.read_text()))

    def test_a_child_that_is_left_behind_is_ended_too(self, tmp_path: Path) -> None:
        script = tmp_path / "leave.py"
        script.write_text(
            "import subprocess, sys\n"
            "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
        )
        ran = run(f"{sys.executable} {script} {{ckpt}} {{out}}", tmp_path, tmp_path / "out", limit=60.0)
        assert ran.exit_code == 0
        begin = time.monotonic()
        while psutil.pid_exists(int(ran.output)) and time.monotonic() - begin < 60:
            time.sleep(0.05)
        assert not psutil.pid_exists(int(ran.output))

    def test_a_signal_is_a_negative_exit_code(self, tmp_path: Path) -> None:
        ran = run(python("import os; os.abort()"), tmp_path, tmp_path / "out", limit=60.0)
        assert ran.exit_code == -6

    def test_code_that_runs_is_noticed(self, tmp_path: Path) -> None:
        """L11."""
        source = 'import os; open(os.environ["FIXTURES_RAN"], "w").close()'
        assert run(python(source), tmp_path, tmp_path / "out", limit=60.0).has_run_code

    def test_nothing_is_asked_of_the_network(self, tmp_path: Path) -> None:
        source = 'import os; print(os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_OFFLINE"])'
        assert run(python(source), tmp_path, tmp_path / "out", limit=60.0).output == "1 1\n"


JUDGEMENTS = (
    Judgement("qwen2-fp32-w4", (), "right", seconds=1.5),
    Judgement("qwen2-fp32-w4+hole", ("S11",), "wrong silently", "one row | is *missing*", 2.0, "Loading\r\x1b[A done"),
    Judgement("tensors-bools", ("S4", "S13"), "skipped", "has no config.json"),
)
SCORE = Score("other 1.0", "other {ckpt} {out}", "any", "2026-01-31", JUDGEMENTS)


class TestReport:
    """What is written down."""

    def test_a_case_is_a_line_and_what_was_wrong_another(self) -> None:
        assert [line for judgement in JUDGEMENTS for line in rows(judgement)] == [
            "right            qwen2-fp32-w4",
            "wrong silently   qwen2-fp32-w4+hole                              S11",
            "                 one row | is *missing*",
            "skipped          tensors-bools                                   S4 S13",
            "                 has no config.json",
        ]

    def test_no_line_is_wider_than_a_terminal(self) -> None:
        lines = [line for name, case in CASES.items() for line in rows(Judgement(name, case.ids, "crashed", "x " * 99))]
        assert [line for line in lines if len(line) > 80] == []

    def test_a_long_reason_is_told_in_full(self) -> None:
        words = " ".join(map(str, range(60)))
        lines = rows(Judgement("a", (), "wrong silently", words))[1:]
        assert len(lines) == 3
        assert " ".join(line.strip() for line in lines) == words

    def test_an_assertion_shows_what_was_wrong_before_what_was_printed(self) -> None:
        assert str(JUDGEMENTS[1]) == (
            "qwen2-fp32-w4+hole: wrong silently: one row | is *missing*\nLoading\r\x1b[A done"
        )
        assert str(JUDGEMENTS[0]) == "qwen2-fp32-w4: right"

    def test_totals_are_by_kind(self) -> None:
        assert totals(JUDGEMENTS) == [
            "right               1",
            "wrong silently      1",
            "skipped             1",
            "in all              3",
        ]

    def test_a_score_is_right_where_nothing_that_was_judged_is_wrong(self) -> None:
        assert not SCORE.is_right
        assert replace(SCORE, judgements=(JUDGEMENTS[0], JUDGEMENTS[2])).is_right

    def test_json_is_read_back(self, tmp_path: Path) -> None:
        write_json(SCORE, tmp_path / "score.json")
        assert read_json(tmp_path / "score.json") == SCORE

    def test_junit_fails_what_is_wrong(self, tmp_path: Path) -> None:
        write_junit(SCORE, tmp_path / "junit.xml")
        suite = ET.parse(tmp_path / "junit.xml").getroot()
        assert dict(suite.attrib) == {"name": "other 1.0", "tests": "3", "failures": "1", "errors": "0", "skipped": "1"}
        assert [(case.get("name"), [child.tag for child in case]) for case in suite] == [
            ("qwen2-fp32-w4", []),
            ("qwen2-fp32-w4+hole", ["failure"]),
            ("tensors-bools", ["skipped"]),
        ]
        failure = suite[1][0]
        assert failure.get("message") == "wrong silently: one row | is *missing*"
        assert failure.text == "Loading[A done"

    def test_scores_stand_side_by_side_between_the_marks(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(f"before\n\n{BEGIN}\nyesterday\n{END}\nafter\n")
        mine = replace(
            SCORE, name="mine", judgements=(JUDGEMENTS[0], Judgement("qwen2-fp32-w4+hole", ("S11",), "right"))
        )
        write_scores(page, [mine, SCORE])
        first = page.read_text()
        write_scores(page, [mine, SCORE])
        assert page.read_text() == first
        assert first.startswith("before\n")
        assert first.endswith("\nafter\n")
        assert "yesterday" not in first
        assert (
            "| verdict | mine | other 1.0 |\n| --- | --- | --- |\n| right | 2 | 1 |\n| wrong silently | 0 | 1 |\n"
            in first
        )
        assert (
            "| `qwen2-fp32-w4+hole`<br>Rank 1 lacks the last row of its piece of a weight, so that no rank holds it. "
            "| S11 | right | **wrong silently**: one row \\| is \\*missing\\* |\n"
        ) in first


class TestCommand:
    """`python -m fixtures judge`."""

    def test_a_glob_without_cases_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["judge", "--command", "true {ckpt} {out}", "--cases", "qwen-fp32-w4"]) == 2
        assert capsys.readouterr().err == (
            "error: no case matches qwen-fp32-w4. Did you mean qwen2-fp32-w4 or qwen2-fp32-w8 or qwen2-fp32-w3?\n"
        )

    def test_a_command_without_its_paths_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["judge", "--command", "true {ckpt}"]) == 2
        assert capsys.readouterr().err == "error: the command has to hold {ckpt} and {out}, but it is: true {ckpt}\n"

    def test_a_command_that_is_not_there_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["judge", "--command", "no-such-merger {ckpt} {out}"]) == 2
        assert capsys.readouterr().err == (
            "error: there is no program no-such-merger; it is the first word of the command: "
            "no-such-merger {ckpt} {out}\n"
        )


def test_large_cases_are_judged_only_where_asked_for() -> None:
    assert "qwen2-0.5b-fp32-w4" not in matching(["*"])
    assert matching(["qwen2-0.5b-fp32-w4*"], large=True) == ["qwen2-0.5b-fp32-w4", "qwen2-0.5b-fp32-w4-lora"]


def test_a_suite_lists_what_it_can_judge() -> None:
    assert Suite("true {ckpt} {out}").cases("tensors-*", "plain-fp32-w1", "llama-fp32-w1") == ["llama-fp32-w1"]
    both = Suite("true {ckpt} {out}", weights_only_command="true {ckpt} {out}")
    assert both.cases("plain-fp32-w1", "llama-fp32-w1") == ["llama-fp32-w1", "plain-fp32-w1"]


def test_a_cached_checkpoint_is_named_for_what_makes_it_and_not_for_what_is_expected() -> None:
    case = CASES["qwen2-fp32-w4"]
    digest = cache._digest(case)
    assert cache._digest(replace(case, expected=(Refused(("a",)),))) == digest
    assert cache._digest(replace(case, dtype="float16")) != digest
    assert len({cache._digest(case) for case in CASES.values()}) == len(CASES)


def test_the_cache_lies_where_caches_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache.default_folder() == Path("/elsewhere/merger-fixtures")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setitem(os.environ, "HOME", "/home/someone")
    assert cache.default_folder() == Path("/home/someone/.cache/merger-fixtures")
