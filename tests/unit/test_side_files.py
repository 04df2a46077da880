"""What lies beside the weights, and the one file of it that may change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from merger.errors import Problem
from merger.huggingface.side_files import SideFile, config_bytes, copy_side_files, output_config, plan_side_files


def fill(folder: Path, *places: str) -> None:
    for place in places:
        path = folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(place.encode())


def places(folder: Path) -> list[str]:
    return [file.relative_path for file in plan_side_files(folder).files]


class TestPlan:
    def test_config_tokenizer_processor_templates_and_code_are_copied(self, tmp_path: Path) -> None:
        """FAULTS L8."""
        wanted = [
            "README.md",
            "additional_chat_templates/tool_use.jinja",
            "chat_template.jinja",
            "chat_template.json",
            "config.json",
            "configuration_own.py",
            "generation_config.json",
            "merges.txt",
            "modeling_own.py",
            "package/inner/helper.py",
            "preprocessor_config.json",
            "processor_config.json",
            "qwen.tiktoken",
            "special_tokens_map.json",
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "training_args.bin",
            "video_preprocessor_config.json",
            "vocab.json",
        ]
        fill(tmp_path, *wanted)
        plan = plan_side_files(tmp_path)
        assert plan.files == tuple(SideFile(place, tmp_path.resolve() / place, len(place)) for place in wanted)
        assert plan.num_bytes == sum(map(len, wanted))
        assert (plan.skipped, plan.problems) == ((), ())

    def test_weights_and_caches_are_skipped_and_listed(self, tmp_path: Path) -> None:
        """FAULTS S16."""
        weights = [
            "adapter_model.bin",
            "consolidated.00.pth",
            "flax_model.msgpack",
            "model-00001-of-00002.safetensors",
            "model.safetensors",
            "model.safetensors.index.json",
            "model_world_size_2_rank_0.pt",
            "onnx/model.onnx",
            "onnx/model.onnx_data",
            "own.gguf",
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "tf_model.h5",
        ]
        fill(tmp_path, "config.json", *weights, ".git/HEAD", "code/__pycache__/x.pyc", ".cache/huggingface/x.lock")
        plan = plan_side_files(tmp_path)
        assert [file.relative_path for file in plan.files] == ["config.json"]
        assert sorted(plan.skipped) == sorted([*weights, ".git/", ".cache/", "code/__pycache__/"])

    @pytest.mark.parametrize(
        ("files", "has_tokenizer"),
        [
            (["tokenizer.json"], True),
            (["tokenizer.model"], True),
            (["vocab.txt"], True),
            (["vocab.json", "merges.txt"], True),
            (["spiece.model"], True),
            (["sentencepiece.bpe.model"], True),
            (["qwen.tiktoken"], True),
            (["tekken.json"], True),
            (["tokenization_own.py"], True),
            (["config.json", "tokenizer_config.json", "special_tokens_map.json"], False),
            (["original/tokenizer.model"], False),
            ([], False),
        ],
    )
    def test_a_tokenizer_is_there_where_its_vocabulary_is(
        self, files: list[str], *, has_tokenizer: bool, tmp_path: Path
    ) -> None:
        """FAULTS S24."""
        fill(tmp_path, *files)
        assert plan_side_files(tmp_path).has_tokenizer is has_tokenizer

    def test_the_report_of_an_earlier_merge_is_left_where_it_is(self, tmp_path: Path) -> None:
        (tmp_path / "deep").mkdir()
        for place in ("config.json", "merger_report.json", "deep/merger_report.json"):
            (tmp_path / place).write_bytes(b"{}")
        plan = plan_side_files(tmp_path)
        assert [file.relative_path for file in plan.files] == ["config.json", "deep/merger_report.json"]
        assert plan.skipped == ("merger_report.json",)

    def test_links_are_followed_to_files_and_folders(self, tmp_path: Path) -> None:
        fill(tmp_path, "blobs/a1b2", "elsewhere/tool_use.jinja")
        folder = tmp_path / "snapshot"
        folder.mkdir()
        (folder / "config.json").symlink_to("../blobs/a1b2")
        (folder / "templates").symlink_to("../elsewhere")
        assert plan_side_files(folder).files == (
            SideFile("config.json", tmp_path.resolve() / "blobs/a1b2", 10),
            SideFile("templates/tool_use.jinja", tmp_path.resolve() / "elsewhere/tool_use.jinja", 24),
        )

    def test_a_link_that_leads_nowhere_is_a_problem(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").symlink_to("../blobs/gone")
        assert plan_side_files(tmp_path).problems == (
            Problem(
                "dangling-link",
                str(tmp_path / "tokenizer.json"),
                "the link leads to ../blobs/gone, which is not there. Restore that file or remove the link.",
            ),
        )

    def test_a_link_to_a_folder_above_and_what_is_no_file_are_skipped(self, tmp_path: Path) -> None:
        fill(tmp_path, "code/a.py")
        (tmp_path / "code" / "up").symlink_to("..")
        os.mkfifo(tmp_path / "pipe")
        plan = plan_side_files(tmp_path)
        assert [file.relative_path for file in plan.files] == ["code/a.py"]
        assert plan.skipped == ("code/up/", "pipe")

    def test_the_order_is_that_of_the_names(self, tmp_path: Path) -> None:
        fill(tmp_path, "b.txt", "a/z.txt", "a.txt", "c/a.txt")
        assert places(tmp_path) == ["a/z.txt", "a.txt", "b.txt", "c/a.txt"]


def test_files_are_copied_byte_for_byte_and_links_become_files(tmp_path: Path) -> None:
    """FAULTS L8."""
    source, target = tmp_path / "source", tmp_path / "target"
    fill(source, "config.json", "code/a.py")
    (source / "tokenizer.json").write_bytes(bytes(range(256)))
    (source / "link.txt").symlink_to("tokenizer.json")
    target.mkdir()
    copy_side_files(plan_side_files(source), target, replaced={"config.json": b"new"})
    copied = {str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert copied == {
        "config.json": b"new",
        "code/a.py": b"code/a.py",
        "tokenizer.json": bytes(range(256)),
        "link.txt": bytes(range(256)),
    }
    assert not (target / "link.txt").is_symlink()


class TestOutputConfig:
    @pytest.mark.parametrize(
        ("config", "dtype", "result"),
        [
            ({"torch_dtype": "float32"}, "bfloat16", {"torch_dtype": "bfloat16"}),
            ({"dtype": "float32"}, "bfloat16", {"dtype": "bfloat16"}),
            ({"dtype": "float32", "torch_dtype": "float32"}, "float16", {"dtype": "float16", "torch_dtype": "float16"}),
            ({"a": 1}, "bfloat16", {"a": 1, "dtype": "bfloat16"}),
            ({"dtype": None}, "bfloat16", {"dtype": "bfloat16"}),
            ({"torch_dtype": "float32"}, None, {"torch_dtype": "float32"}),
            ({"a": 1}, None, {"a": 1}),
            (
                {"text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float32", "depth": 2}},
                "bfloat16",
                {"text_config": {"dtype": "bfloat16"}, "vision_config": {"dtype": "bfloat16", "depth": 2}},
            ),
            (
                {"dtype": "float32", "quantization_config": {"dtype": "int8"}},
                "bfloat16",
                {"dtype": "bfloat16", "quantization_config": {"dtype": "int8"}},
            ),
        ],
    )
    def test_the_dtype_is_set_where_it_is_stated(
        self, config: dict[str, Any], dtype: str | None, result: dict[str, Any]
    ) -> None:
        assert output_config(config, dtype=dtype, tied=None) == result

    @pytest.mark.parametrize(
        ("config", "tied", "result"),
        [
            ({"tie_word_embeddings": True}, False, {"tie_word_embeddings": False}),
            ({}, False, {"tie_word_embeddings": False}),
            ({"tie_word_embeddings": True}, True, {"tie_word_embeddings": True}),
            ({}, True, {}),
            ({"tie_word_embeddings": True}, None, {"tie_word_embeddings": True}),
            (
                {"text_config": {"tie_word_embeddings": True}},
                False,
                {"text_config": {"tie_word_embeddings": False}, "tie_word_embeddings": False},
            ),
            ({"text_config": {"a": 1}}, False, {"text_config": {"a": 1}, "tie_word_embeddings": False}),
        ],
    )
    def test_only_a_broken_tie_changes_the_switch(
        self, config: dict[str, Any], *, tied: bool | None, result: dict[str, Any]
    ) -> None:
        """FAULTS S12."""
        assert output_config(config, dtype=None, tied=tied) == result

    def test_the_prefix_of_fsdp_goes_from_the_class_names(self) -> None:
        """FAULTS L6."""
        config = {"architectures": ["FSDPQwen2ForCausalLM", "LlamaModel"]}
        assert output_config(config, dtype=None, tied=None) == {"architectures": ["Qwen2ForCausalLM", "LlamaModel"]}

    def test_the_given_config_and_its_parts_are_not_changed(self) -> None:
        config = {"architectures": ["FSDPX"], "text_config": {"dtype": "float32", "tie_word_embeddings": True}}
        before = json.dumps(config)
        output_config(config, dtype="bfloat16", tied=False)
        assert json.dumps(config) == before


class TestConfigBytes:
    @pytest.mark.parametrize(
        "original", [b'{"b":1,\r\n\t"a" :  [1.50, 1e-6]}', b"\xef\xbb\xbf{}", b'{"dtype": "float32"}\n\n']
    )
    def test_the_original_bytes_stay_where_nothing_changes(self, original: bytes) -> None:
        config = output_config(json.loads(original), dtype=None, tied=None)
        assert config_bytes(original, config) == original

    @pytest.mark.parametrize(
        ("original", "expected"),
        [
            (b'{\n  "z": [\n    1\n  ],\n  "a": 2\n}\n', b'{\n  "z": [\n    1\n  ],\n  "a": 3\n}\n'),
            (b'{\n    "z": 1e-06,\n    "a": 2\n}', b'{\n    "z": 1e-06,\n    "a": 3\n}'),
            (b'{\n\t"a": 2\n}\n', b'{\n\t"a": 3\n}\n'),
            (b'{"z": null, "a": 2}', b'{"z": null, "a": 3}'),
            (b'{"z": "\\u00e9", "a": 2}', b'{"z": "\\u00e9", "a": 3}'),
            ('{"z": "\u00e9", "a": 2}'.encode(), '{"z": "\u00e9", "a": 3}'.encode()),
        ],
    )
    def test_a_change_keeps_order_indentation_escaping_and_the_last_newline(
        self, original: bytes, expected: bytes
    ) -> None:
        assert config_bytes(original, {**json.loads(original), "a": 3}) == expected
