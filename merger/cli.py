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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import merger
from merger import terminal
from merger.arguments import answered_flags, command_parser, parsed
from merger.errors import MergerError
from merger.huggingface.lora_export import FOLDER as ADAPTER_FOLDER
from merger.page import Page, is_able, joined, page_of
from merger.starting import INTERRUPTED, INTERRUPTED_CODE, end_guard

_OK, _DIFFERENT, _BAD_INPUT, _TERMINATED = 0, 1, 2, 143
# Options of a merge that `verify --source` takes too.
_FOR_SOURCE = (
    "world_size",
    "shard_order",
    "reduce_partial",
    "config",
    "lora",
    "lora_alpha",
    "lora_adapter",
    "base",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = command_parser(
        {"merge": _merge, "inspect": _inspect, "verify": _verify, "test": _verify, "upload": _upload}
    )
    options = parsed(parser, sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the terminal's encoding lacks must not fail a merge that is complete.
            stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminate)
    try:
        end_guard()
        code: int = options.run(options)
    except MergerError as error:
        return _fail(options, str(error), [dataclasses.asdict(problem) for problem in error.problems])
    except BrokenPipeError:
        # Whoever read our output has gone; there is nobody to tell.
        _close_stdout()
        return _OK
    except OSError as error:
        return _fail(options, str(error), [])
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return INTERRUPTED_CODE
    except _TerminatedError:
        print("merger: terminated; nothing half-made was left behind", file=sys.stderr)
        return _TERMINATED
    return code


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
    if options.upload is None and (options.private or options.revision):
        options.parser.error("--private and --revision are for --upload")
    if options.upload is not None and options.lora == "adapter":
        options.parser.error("--upload sends a model, and --lora adapter writes none")
    if options.upload is not None:
        merger.check_upload(options.upload)
    with _progress("merging", options) as progress:
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
            names=options.names,
            value_model=options.is_value_model,
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
    report = dataclasses.replace(report, notes=(*report.notes, *answered_flags(options)))
    if options.upload is None or options.dry_run:
        _print(options, report, terminal.merge_text(report, given=_asked_again(options), page=_page()))
        return _OK
    if not options.json:
        _print(options, report, terminal.merge_text(report, is_last=False, page=_page()))
    # peft looks for an adapter at the top of a repository.
    folder = report.output if report.has_model else report.output / ADAPTER_FOLDER
    uploaded = _uploaded(options, folder, options.upload)
    _print(options, {**_plain(report), "upload": _plain(uploaded)}, terminal.upload_text(uploaded, page=_page()))
    return _OK


def _asked_again(options: argparse.Namespace) -> dict[str, Any]:
    """The options of a merge that its output has to be verified with: all that count, where no report states them."""
    return {name: getattr(options, name) for name in (_FOR_SOURCE if options.no_report else ("base",))}


def _upload(options: argparse.Namespace) -> int:
    report = _uploaded(options, options.output, options.repo)
    _print(options, report, terminal.upload_text(report, page=_page()))
    return _OK


def _uploaded(options: argparse.Namespace, output: Path, repo: str) -> merger.UploadReport:
    with _leaving_at_once():
        return merger.upload(
            output,
            repo,
            private=options.private,
            revision=options.revision,
            show_progress=_has_bar(options),
        )


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Ends the process when a signal comes: there is nothing to tidy up.

    huggingface_hub would wait for its threads, which send their file to its end, and that may take minutes.
    """

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        print(
            "merger: interrupted; what was sent stays: run `merger upload` to send the rest",
            file=sys.stderr,
            flush=True,
        )
        os._exit(INTERRUPTED_CODE if number == signal.SIGINT else _TERMINATED)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    _print(options, report, terminal.inspect_text(report, page=_page()))
    return _BAD_INPUT if report.problems else _OK


def _verify(options: argparse.Namespace) -> int:
    checkpoint, reference = options.checkpoint or options.local_dir, options.reference or options.test_hf_dir
    if options.source is not None:
        if checkpoint is None or reference is not None:
            options.parser.error("give OUT --source CKPT, without a REFERENCE")
        return _verify_merge(options, checkpoint)
    if any(value is not None for value in (options.config, options.base, options.lora, options.lora_adapter)):
        options.parser.error("--config, --base, --lora and --lora-adapter are for --source alone")
    if checkpoint is None or reference is None:
        options.parser.error("give CKPT and REFERENCE (or --local_dir and --test_hf_dir)")
    with _progress("comparing", options) as progress:
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
            progress=progress,
        )
    report = dataclasses.replace(report, notes=(*report.notes, *answered_flags(options)))
    _print(options, report, terminal.verify_text(report, page=_page()))
    return _OK if report.is_equal else _DIFFERENT


def _verify_merge(options: argparse.Namespace, output: Path) -> int:
    if options.atol or options.rtol or options.logits:
        options.parser.error("--source compares bit for bit: leave out --atol, --rtol and --logits")
    with _progress("comparing", options) as progress:
        report = merger.verify_merge(
            output,
            options.source,
            **{name: getattr(options, name) for name in _FOR_SOURCE},
            workers=options.workers,
            progress=progress,
        )
    _print(options, report, terminal.verify_text(report, is_merge=True, page=_page()))
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
        _close_stdout()
        reason = error.strerror or str(error)
        raise OSError(f"all is done, but the report could not be printed ({reason})") from error


def _close_stdout() -> None:
    """Lets what could not be printed go nowhere: Python would try once more as it ends, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _plain(report: Any) -> dict[str, Any]:  # noqa: ANN401 - any of the reports
    """A report as JSON knows it: its verdict among its fields, and no infinity."""
    fields: dict[str, Any] = report if isinstance(report, dict) else dataclasses.asdict(report)
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
        try:
            print(json.dumps({"error": message, "problems": problems}, indent=2), flush=True)
        except OSError:  # what is wrong stands on stderr all the same
            _close_stdout()
    page = page_of(sys.stderr, os.environ)
    if not sys.stderr.isatty():
        page = dataclasses.replace(page, width=sys.maxsize)  # a log keeps a message on the line that it is searched by
    print(joined(page.message("merger: error: ", message, "bad")), file=sys.stderr)
    return _BAD_INPUT


def _page() -> Page:
    return page_of(sys.stdout, os.environ)


def _has_bar(options: argparse.Namespace) -> bool:
    """Whether stderr is a terminal that can show one, and something is to be printed."""
    return is_able(sys.stderr, os.environ) and not (options.quiet or options.json)


@contextmanager
def _progress(what: str, options: argparse.Namespace) -> Iterator[Callable[[int, int], None] | None]:
    """A bar in bytes, with the rate and the time left; none where `_has_bar` says so."""
    if not _has_bar(options):
        yield None
        return
    from tqdm import tqdm

    with ExitStack() as stack:
        bar: tqdm[NoReturn] | None = None

        def show(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                # No wider than a report; and some terminals break a line that fills the last column.
                columns = page_of(sys.stderr, os.environ).width - 1
                bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, leave=False, ncols=columns, ascii=True)
                stack.enter_context(bar)
            bar.update(done - bar.n)
            if done == total:  # between, it is drawn ten times a second
                bar.refresh()

        yield show
