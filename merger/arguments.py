"""The arguments of the command: which commands there are, their flags and their help. It parses, and no more."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from merger.plan import parse_size
from merger.verify import LOGITS_ATOL
from merger.version import __version__

# Flags of verl's model merger that change nothing here, each with why.
_ANSWERS = {
    "--trust-remote-code": "code that comes with a model is never run to merge it, and is copied as it is",
    "--tie-word-embedding": "config.json says whether embeddings are tied; a head that differs is written all the same",
    "--use_cpu_initialization": "no model is initialised, and no GPU is used",
}

_ANSWERS_TO_VERIFY = {
    **_ANSWERS,
    "--is-value-model": "what is compared are the tensors, and they have their names from config.json",
}

Run: TypeAlias = Callable[[argparse.Namespace], int]

# How alike a flag has to be to be asked for: --shard-size is 0.86 like --max-shard-size, chance gives 0.7.
_LIKENESS = 0.75

_LORA_MODES = ["merge", "adapter", "both", "base"]

# What verl's own `test` allows, for those who come with its flags.
_VERL_TOLERANCE = 1e-6


def command_parser(runs: Mapping[str, Run]) -> argparse.ArgumentParser:
    """The parser of all commands; what it parses holds under `run` what of `runs` is to be called with it."""
    parser = argparse.ArgumentParser(
        prog="merger",
        description="Turns the sharded checkpoint of a distributed training run into a Hugging Face model directory.",
    )
    parser.add_argument("--version", action="version", version=f"merger {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_merge(commands.add_parser("merge", help="merge a sharded checkpoint into a model directory"))
    _add_inspect(commands.add_parser("inspect", help="say what a checkpoint is, without reading its data"))
    verify = commands.add_parser("verify", help="compare a checkpoint with a model, or a model with its checkpoint")
    _add_verify(verify, tolerance=0.0)
    _add_source_check(verify)
    _add_logits(verify)
    test = commands.add_parser("test", help="verify, by the name and flags of verl's merger")
    _add_verify(test, _VERL_TOLERANCE)
    test.set_defaults(source=None, config=None, base=None, lora=None, lora_adapter=None)
    test.set_defaults(logits=False, logits_atol=LOGITS_ATOL)
    _add_upload(commands.add_parser("upload", help="upload a merged model to the Hugging Face Hub"))
    for name, command in commands.choices.items():
        command.set_defaults(run=runs[name], parser=command)
    return parser


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """What `words` ask of a parser of all commands; exits with 2 and a hint where they err."""
    options, unknown = parser.parse_known_args(words)
    if "" in words:
        options.parser.error("an argument is empty; is a variable of the shell not set?")
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}; {_hint(options.parser, unknown[0])}")
    return options


def _hint(parser: argparse.ArgumentParser, word: str) -> str:
    if not word.startswith("-"):
        return "a path with blanks has to be quoted"
    shown = [name for name in parser.format_help().replace(",", " ").split() if name.startswith("--")]
    if near := difflib.get_close_matches(word.partition("=")[0], shown, 1, _LIKENESS):
        return f"is it {near[0]}?"
    return f"{parser.prog} --help lists them"


def answered_flags(options: argparse.Namespace) -> tuple[str, ...]:
    """A sentence for each flag that was given and changes nothing."""
    answers: Mapping[str, str] = options.answers
    return tuple(
        f"{flag} changes nothing: {why}"
        for flag, why in answers.items()
        if getattr(options, flag.removeprefix("--").replace("-", "_"))
    )


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] CKPT OUT"
    parser.add_argument("checkpoint", metavar="CKPT", nargs="?", type=Path, help="folder with the per-rank files")
    parser.add_argument("output", metavar="OUT", nargs="?", type=Path, help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=["auto", "keep", "bfloat16", "float16", "float32"],
        default="auto",
        help="cast floating tensors (auto: to what config.json states, else keep)",
    )
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="most bytes per weight file (5GB)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a model that is at OUT, as a whole")
    parser.add_argument("--dry-run", action="store_true", help="check all that headers tell and plan, write nothing")
    parser.add_argument("--config", type=Path, metavar="DIR", help="folder with config.json and tokenizer")
    parser.add_argument("--weights-only", action="store_true", help="merge without config.json or any check against it")
    parser.add_argument(
        "--unexpected",
        choices=["error", "keep", "drop"],
        default="error",
        help="what to do with tensors that the architecture does not have (error)",
    )
    parser.add_argument(
        "--names",
        choices=["hub", "as-is"],
        default="hub",
        help="write the names and shapes of the hub, or those of the checkpoint (hub)",
    )
    parser.add_argument(
        "--is-value-model",
        action="store_true",
        help="it is a critic: take the class for token classification, whatever config.json says",
    )
    parser.add_argument("--no-checksum", action="store_true", help="do not verify the CRC-32 of what is copied")
    parser.add_argument(
        "--check-replicas", action="store_true", help="read and compare replicas in full, not by checksum only"
    )
    parser.add_argument(
        "--lora",
        choices=_LORA_MODES,
        default="both",
        help="what to write of a checkpoint with LoRA: the model with it folded in, the adapter, both (the default), "
        "or the base weights and the adapter",
    )
    parser.add_argument("--lora-alpha", type=_number, metavar="N", help="alpha of LoRA, where no file states it")
    parser.add_argument("--lora-adapter", metavar="NAME", help="which adapter, where a checkpoint holds several")
    parser.add_argument("--base", type=Path, metavar="DIR", help="base model of a checkpoint of adapters alone")
    parser.add_argument("--no-report", action="store_true", help="do not write merger_report.json into OUT")
    parser.add_argument("--upload", metavar="REPO", help="then upload OUT to this repository of the Hugging Face Hub")
    _add_upload_options(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _add_source_options(parser)
    _add_verl_options(parser, _ANSWERS)
    parser.add_argument("--target_dir", metavar="OUT", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hf_upload_path", metavar="REPO", dest="upload", help=argparse.SUPPRESS)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="folder with the per-rank files, or a model")
    parser.add_argument("--tensors", metavar="GLOB", help="list the tensors whose names match, such as '*.0.*'")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw which rank holds what, as FILE.svg or FILE.html"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a picture that is at FILE")
    _add_source_options(parser)


def _add_verify(parser: argparse.ArgumentParser, tolerance: float) -> None:
    parser.usage = "%(prog)s [options] CKPT REFERENCE"
    parser.add_argument("checkpoint", metavar="CKPT", nargs="?", type=Path, help="sharded checkpoint, or a model")
    parser.add_argument("reference", metavar="REFERENCE", nargs="?", type=Path, help="Hugging Face model directory")
    parser.add_argument("--atol", type=float, default=tolerance, help=f"absolute tolerance ({tolerance:g})")
    parser.add_argument("--rtol", type=float, default=tolerance, help=f"relative tolerance ({tolerance:g})")
    parser.add_argument("--lora-alpha", type=_number, metavar="N", help="alpha of LoRA, where no file states it")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors; the exit code is the verdict")
    _add_source_options(parser)
    _add_verl_options(parser, _ANSWERS_TO_VERIFY)
    parser.add_argument("--test_hf_dir", metavar="REFERENCE", type=Path, help=argparse.SUPPRESS)


def _add_upload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("output", metavar="OUT", type=Path, help="model directory")
    parser.add_argument(
        "repo", metavar="REPO", help="repository of the Hub, NAMESPACE/NAME; it is made where it is not"
    )
    _add_upload_options(parser)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_upload_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--private", action="store_true", help="make the repository private; a public one is refused")
    parser.add_argument("--revision", metavar="BRANCH", help="branch to upload to; it is made where it is not (main)")


def _add_source_check(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] CKPT REFERENCE\n       %(prog)s [options] OUT --source CKPT"
    parser.add_argument(
        "--source", metavar="CKPT", type=Path, help="compare OUT, bit for bit, with what a merge of CKPT writes"
    )
    parser.add_argument("--config", metavar="DIR", type=Path, help="the folder that the merge of CKPT took by --config")
    parser.add_argument("--base", metavar="DIR", type=Path, help="the folder that the merge of CKPT took by --base")
    parser.add_argument(
        "--lora", choices=_LORA_MODES, help="what the merge of CKPT wrote, where no merger_report.json says it"
    )
    parser.add_argument("--lora-adapter", metavar="NAME", help="which adapter the merge of CKPT took, likewise")


def _add_logits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--logits", action="store_true", help="also run both model directories on a few tokens, on the CPU"
    )
    parser.add_argument(
        "--logits-atol",
        type=float,
        default=LOGITS_ATOL,
        metavar="ATOL",
        help=f"how far logits may be apart ({LOGITS_ATOL:g})",
    )


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=_positive, metavar="N", help="which set, where a folder holds several")
    parser.add_argument(
        "--shard-order",
        choices=["group", "coordinate"],
        help="how pieces were dealt where ranks do not ascend along a mesh axis",
    )
    parser.add_argument(
        "--reduce-partial", action="store_true", help="reduce over the ranks what was saved before its reduction"
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="threads that copy, and processes that read headers where ranks are many (up to 4 by default)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_verl_options(parser: argparse.ArgumentParser, answers: Mapping[str, str]) -> None:
    """The flags of verl's model merger, which mean the same here, or are taken and answered (`answered_flags`)."""
    parser.add_argument("--backend", choices=["fsdp"], help=argparse.SUPPRESS)
    parser.add_argument("--local_dir", metavar="CKPT", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(answers=answers)
    for flag in answers:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(number) if number.is_integer() else number


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)
