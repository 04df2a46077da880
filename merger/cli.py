"""The command line: parses, calls one public function, prints what it returns. No logic.

Exit codes: 0 done, 1 differences found, 2 bad input or target, or faults found by `inspect`, 130 on Ctrl-C, 143 on
SIGTERM or SIGHUP.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import merger
from merger import terminal
from merger.errors import MergerError
from merger.plan import parse_size
from merger.verify import LOGITS_ATOL

_OK, _DIFFERENT, _BAD_INPUT, _INTERRUPTED, _TERMINATED = 0, 1, 2, 130, 143
# What verl's own `test` allows, for those who come with its flags.
_VERL_TOLERANCE = 1e-6


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks must not fail a merge that is complete.
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        return run(options)
    except MergerError as error:
        return _fail(options, str(error), [dataclasses.asdict(problem) for problem in error.problems])
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK
    except OSError as error:
        return _fail(options, str(error), [])
    except KeyboardInterrupt:
        print("merger: interrupted; nothing half-made was left behind", file=sys.stderr)
        return _INTERRUPTED
    except _TerminatedError:
        print("merger: terminated; nothing half-made was left behind", file=sys.stderr)
        return _TERMINATED


class _TerminatedError(BaseException):
    """SIGTERM came: unwinds, so that what is half-written is removed."""


def _terminate(number: int, _frame: FrameType | None) -> NoReturn:
    # Once is enough: a second one must not cut short the tidying.
    signal.signal(number, signal.SIG_IGN)
    raise _TerminatedError


def _merge(options: argparse.Namespace) -> int:
    checkpoint, output = options.checkpoint or options.local_dir, options.output or options.target_dir
    if (options.checkpoint and options.local_dir) or (options.output and options.target_dir):
        options.parser.error("give CKPT and OUT once: as they are, or by --local_dir and --target_dir")
    if options.config and options.weights_only:
        options.parser.error("--config and --weights-only exclude each other")
    if checkpoint is None or output is None:
        options.parser.error("give CKPT and OUT (or --local_dir and --target_dir)")
    with _progress(quiet=options.quiet or options.json) as progress:
        report = merger.merge(
            checkpoint,
            output,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            dry_run=options.dry_run,
            world_size=options.world_size,
            config=options.config,
            weights_only=options.weights_only,
            unexpected=options.unexpected,
            checksum=not options.no_checksum,
            check_replicas=options.check_replicas,
            shard_order=options.shard_order,
            reduce_partial=options.reduce_partial,
            lora=options.lora,
            lora_alpha=options.lora_alpha,
            lora_adapter=options.lora_adapter,
            base=options.base,
            workers=options.workers,
            report=not options.no_report,
            progress=progress,
        )
    _print(options, report, terminal.merge_text(report))
    return _OK


def _inspect(options: argparse.Namespace) -> int:
    report = merger.inspect(
        options.checkpoint,
        tensors=options.tensors,
        world_size=options.world_size,
        shard_order=options.shard_order,
        reduce_partial=options.reduce_partial,
        workers=options.workers,
        picture=options.picture,
        overwrite=options.overwrite,
    )
    _print(options, report, terminal.inspect_text(report))
    return _BAD_INPUT if report.problems else _OK


def _verify(options: argparse.Namespace) -> int:
    checkpoint, reference = options.checkpoint or options.local_dir, options.reference or options.test_hf_dir
    if options.source is not None:
        if checkpoint is None or reference is not None:
            options.parser.error("give OUT --source CKPT, without a REFERENCE")
        return _verify_merge(options, checkpoint)
    if options.config is not None or options.base is not None:
        options.parser.error("--config and --base are for --source alone")
    if checkpoint is None or reference is None:
        options.parser.error("give CKPT and REFERENCE (or --local_dir and --test_hf_dir)")
    report = merger.verify(
        checkpoint,
        reference,
        atol=options.atol,
        rtol=options.rtol,
        world_size=options.world_size,
        shard_order=options.shard_order,
        reduce_partial=options.reduce_partial,
        lora_alpha=options.lora_alpha,
        workers=options.workers,
        logits=options.logits,
        logits_atol=options.logits_atol,
    )
    _print(options, report, terminal.verify_text(report))
    return _OK if report.is_equal else _DIFFERENT


def _verify_merge(options: argparse.Namespace, output: Path) -> int:
    if options.atol or options.rtol or options.logits:
        options.parser.error("--source compares bit for bit: leave out --atol, --rtol and --logits")
    report = merger.verify_merge(
        output,
        options.source,
        config=options.config,
        base=options.base,
        world_size=options.world_size,
        shard_order=options.shard_order,
        reduce_partial=options.reduce_partial,
        workers=options.workers,
    )
    _print(options, report, terminal.verify_text(report))
    return _OK if report.is_equal else _DIFFERENT


def _print(options: argparse.Namespace, report: Any, text: str) -> None:  # noqa: ANN401 - any of the reports
    if options.json:
        text = json.dumps(_plain(report), indent=2, default=str)
    elif getattr(options, "quiet", False):
        return
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"all is done, but the report could not be printed ({reason})") from error


def _plain(report: Any) -> dict[str, Any]:  # noqa: ANN401 - any of the reports
    """A report as JSON knows it: its verdict among its fields, and no infinity."""
    fields: dict[str, Any] = dataclasses.asdict(report)
    if isinstance(report, merger.VerifyReport):
        fields["is_equal"] = report.is_equal
        for comparison in fields["comparisons"]:
            if comparison["max_difference"] == math.inf:
                comparison["max_difference"] = None
        if fields["logits"] is not None and fields["logits"]["max_difference"] == math.inf:
            fields["logits"]["max_difference"] = None
    return fields


def _fail(options: argparse.Namespace, message: str, problems: list[dict[str, str]]) -> int:
    if options.json:
        print(json.dumps({"error": message, "problems": problems}, indent=2))
    print("\n".join(map(terminal.printable, f"merger: error: {message}".splitlines())), file=sys.stderr)
    return _BAD_INPUT


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar in bytes on the terminal; none where stderr is no terminal."""
    if quiet:
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc="merging", leave=False, dynamic_ncols=True, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="merger",
        description="Turns the sharded checkpoint of a distributed training run into a Hugging Face model directory.",
    )
    parser.add_argument("--version", action="version", version=f"merger {merger.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_merge(commands.add_parser("merge", help="merge a sharded checkpoint into a model directory"))
    _add_inspect(commands.add_parser("inspect", help="say what a checkpoint is, without reading its data"))
    verify = commands.add_parser("verify", help="compare a checkpoint with a model, or a model with its checkpoint")
    _add_verify(verify, tolerance=0.0)
    _add_source_check(verify)
    _add_logits(verify)
    test = commands.add_parser("test", help="verify, by the name and flags of verl's merger")
    _add_verify(test, _VERL_TOLERANCE)
    test.set_defaults(source=None, config=None, base=None, logits=False, logits_atol=LOGITS_ATOL)
    return parser


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] CKPT OUT"
    parser.set_defaults(run=_merge, parser=parser)
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
    parser.add_argument("--no-checksum", action="store_true", help="do not verify the CRC-32 of what is copied")
    parser.add_argument(
        "--check-replicas", action="store_true", help="read and compare replicas in full, not by checksum only"
    )
    parser.add_argument(
        "--lora",
        choices=["merge", "adapter", "both", "base"],
        default="both",
        help="what to write of a checkpoint with LoRA: the model with it folded in, the adapter, both (the default), "
        "or the base weights and the adapter",
    )
    parser.add_argument("--lora-alpha", type=_number, metavar="N", help="alpha of LoRA, where no file states it")
    parser.add_argument("--lora-adapter", metavar="NAME", help="which adapter, where a checkpoint holds several")
    parser.add_argument("--base", type=Path, metavar="DIR", help="base model of a checkpoint of adapters alone")
    parser.add_argument("--no-report", action="store_true", help="do not write merger_report.json into OUT")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _add_source_options(parser)
    _add_verl_options(parser)
    parser.add_argument("--target_dir", metavar="OUT", type=Path, help=argparse.SUPPRESS)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_inspect, parser=parser)
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="folder with the per-rank files, or a model")
    parser.add_argument("--tensors", metavar="GLOB", help="list the tensors whose names match, such as '*.0.*'")
    parser.add_argument(
        "--picture", metavar="FILE", type=Path, help="draw which rank holds what, as FILE.svg or FILE.html"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a picture that is at FILE")
    _add_source_options(parser)


def _add_verify(parser: argparse.ArgumentParser, tolerance: float) -> None:
    parser.usage = "%(prog)s [options] CKPT REFERENCE"
    parser.set_defaults(run=_verify, parser=parser)
    parser.add_argument("checkpoint", metavar="CKPT", nargs="?", type=Path, help="sharded checkpoint, or a model")
    parser.add_argument("reference", metavar="REFERENCE", nargs="?", type=Path, help="Hugging Face model directory")
    parser.add_argument("--atol", type=float, default=tolerance, help=f"absolute tolerance ({tolerance:g})")
    parser.add_argument("--rtol", type=float, default=tolerance, help=f"relative tolerance ({tolerance:g})")
    parser.add_argument("--lora-alpha", type=_number, metavar="N", help="alpha of LoRA, where no file states it")
    _add_source_options(parser)
    _add_verl_options(parser)
    parser.add_argument("--test_hf_dir", metavar="REFERENCE", type=Path, help=argparse.SUPPRESS)


def _add_source_check(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] CKPT REFERENCE\n       %(prog)s [options] OUT --source CKPT"
    parser.add_argument(
        "--source", metavar="CKPT", type=Path, help="compare OUT, bit for bit, with what a merge of CKPT writes"
    )
    parser.add_argument("--config", metavar="DIR", type=Path, help="the folder that the merge of CKPT took by --config")
    parser.add_argument("--base", metavar="DIR", type=Path, help="the folder that the merge of CKPT took by --base")


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


def _add_verl_options(parser: argparse.ArgumentParser) -> None:
    """The flags of verl's model merger, which mean the same here."""
    parser.add_argument("--backend", choices=["fsdp"], help=argparse.SUPPRESS)
    parser.add_argument("--local_dir", metavar="CKPT", type=Path, help=argparse.SUPPRESS)


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
