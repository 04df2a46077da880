"""Reports as text for people: what stands on which line, and what to do next at the end. `page.py` breaks the lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from merger.adapters import LoraSummary
from merger.checks import grid_text, limit_problems, ranks_text, shape_text
from merger.flags import flags_of
from merger.huggingface.hub import UploadReport
from merger.huggingface.lora_export import FOLDER as ADAPTER_FOLDER
from merger.inspect import InspectReport, MeshSummary, TensorSummary
from merger.page import Page, joined, printable
from merger.report import MergeReport
from merger.sources.safetensors_files import FORMAT as MODEL_DIRECTORY
from merger.verify import TensorComparison, VerifyReport

# A page for a log.
_PLAIN = Page()
_NOTHING: Mapping[str, Any] = MappingProxyType({})
# How many tensors that differ are listed before the rest are counted.
_MAX_DIFFERENCES = 20
# How many ranks of a mesh are written out.
_MAX_MESH_RANKS = 16
# Of how many copies of a mesh the ranks are written out.
_MAX_MESH_COPIES = 3


def merge_text(
    report: MergeReport, *, is_last: bool = True, given: Mapping[str, Any] = _NOTHING, page: Page = _PLAIN
) -> str:
    """What a merge did, and, where nothing else `is_last`, what to do next.

    `given` are the options that have to be given again when the output is verified, as no report states them.
    """
    would = "would merge" if report.dry_run else "merged"
    files = _counted(len(report.weight_files), "file")
    lines = [
        *page.naming(f"{would} {_counted(report.world_size, 'rank')} of", report.checkpoint, "heading"),
        *page.line(f"  into      {report.output}"),
        *page.wrapped("  tensors   ", f"{report.num_tensors:,}: {_counts(report.dtypes)}" if report.dtypes else "none"),
        *page.wrapped("  weights   ", f"{size_text(report.num_bytes)} in {files}"),
    ]
    if report.lora is not None:
        lines += page.wrapped("  lora      ", _lora_text(report.lora))
    if report.casts:
        lines += page.wrapped("  cast      ", _counts(report.casts))
    if report.side_files:
        lines += page.wrapped("  beside    ", ", ".join(report.side_files))
    for note in report.notes:
        lines += page.wrapped("  note      ", note)
    if report.dry_run:
        lines += page.line("nothing was written (--dry-run)", "good")
        lines += page.line("next: the same command without --dry-run")
    elif is_last:
        output, checkpoint = str(report.output), str(report.checkpoint)
        lines += page.command("next: ", ["merger", "verify"], [output], ["--source", checkpoint], *flags_of(given))
    return joined(lines)


def upload_text(report: UploadReport, *, page: Page = _PLAIN) -> str:
    """What was uploaded, and where it is now."""
    sent = f"{_counted(report.num_files, 'file')}, {size_text(report.num_bytes)}"
    lines = [
        *page.naming(f"uploaded {sent}, of", report.output, "heading"),
        *page.line(f"  to        {report.url}"),
        *page.line(f"  commit    {report.commit}"),
    ]
    if report.deleted:
        lines += page.wrapped("  deleted   ", ", ".join(report.deleted))
    model = f'"{report.repo}"' + (f', revision="{report.revision}"' if report.revision != "main" else "")
    loading = "PeftModel.from_pretrained(base, " if report.is_adapter else "AutoModel.from_pretrained("
    lines += page.line(f"next: {loading}{model})")
    return joined(lines)


def inspect_text(report: InspectReport, *, page: Page = _PLAIN) -> str:
    """What a checkpoint is."""
    files = f"({_counted(report.num_files, 'file')}, {size_text(report.file_bytes)})"
    lines = [
        *page.line(str(report.checkpoint), "heading"),
        *page.wrapped("  format    ", report.format),
        *page.wrapped("  ranks     ", f"{report.world_size} {files}"),
    ]
    for mesh in report.meshes:
        lines += page.wrapped("  mesh      ", _mesh_text(mesh))
    if report.num_tensors or not report.problems:  # a fault may leave it unknown which tensors there are
        elements = f"{report.num_elements:,} elements, {size_text(report.num_bytes)} merged"
        lines += page.wrapped("  tensors   ", f"{report.num_tensors:,}, {elements}")
        lines += page.wrapped("  dtypes    ", _counts(report.dtypes) or "none")
        lines += page.items("  placed    ", [f"{number:,} {name}" for name, number in report.placements.items()])
    if report.lora is not None:
        lines += page.wrapped("  lora      ", _lora_text(report.lora))
    lines += page.line(f"  config    {report.config_dir or 'none'}")
    for note in report.notes:
        lines += page.wrapped("  note      ", note)
    if report.picture is not None:
        lines += page.line(f"  picture   {report.picture}")
    if report.tensors:
        lines += ["", *_listing(report.tensors, page)]
    if report.problems:
        faults = f"{_counted(len(report.problems), 'fault')}; it cannot be merged as it is:"
        lines += ["", *page.wrapped("", faults, "bad")]
        for problem in limit_problems(report.problems):
            lines += page.wrapped("  - ", str(problem))
        again = "mend that, then look again by the same command"
        lines += page.wrapped("next: ", again if len(report.problems) == 1 else again.replace("that", "these", 1))
    else:
        found = "no fault found (headers only; a merge also checks config.json and all data)"
        lines += page.wrapped("", found, "good")
        lines += _after_inspection(report, page)
    return joined(lines)


def _after_inspection(report: InspectReport, page: Page) -> list[str]:
    checkpoint = str(report.checkpoint)
    if report.format == MODEL_DIRECTORY:
        return page.command("next: ", ["merger", "verify"], ["CKPT"], [checkpoint])
    lora = report.lora
    needs_config = report.config_dir is None and (lora is None or lora.has_base)
    return page.command(
        "next: ",
        *(["merger", "merge"], [checkpoint], ["OUT"]),
        *([["--config", "DIR"]] if needs_config else []),
        *([["--lora-adapter", "NAME"]] if lora is not None and len(lora.adapters) > 1 else []),
        *([["--lora-alpha", "N"]] if lora is not None and lora.alpha is None else []),
    )


def verify_text(report: VerifyReport, *, is_merge: bool = False, page: Page = _PLAIN) -> str:
    """How a checkpoint compares with a reference; where it `is_merge`, how an output does with what it was made of."""
    lines = [*page.line(str(report.checkpoint), "heading"), *page.line(f"  against   {report.reference}")]
    for note in report.notes:
        lines += page.wrapped("  note      ", note)
    by_status: dict[str, list[TensorComparison]] = {}
    for comparison in report.comparisons:
        by_status.setdefault(comparison.status, []).append(comparison)
    rounded = Counter(comparison.detail for comparison in by_status.get("equal", []) if comparison.detail != "equal")
    for detail, number in rounded.items():
        lines += page.wrapped("  note      ", f"{_counted(number, 'tensor')}: {detail}")
    counts = _counts({status: len(found) for status, found in by_status.items()})
    lines += page.wrapped("  compared  ", counts or "nothing")
    bad = [comparison for comparison in report.comparisons if comparison.status not in ("equal", "close")]
    for comparison in bad[:_MAX_DIFFERENCES]:
        lines += page.wrapped("  - ", f"{comparison.name}: {comparison.detail}")
    if len(bad) > _MAX_DIFFERENCES:
        lines += page.line(f"  - and {len(bad) - _MAX_DIFFERENCES} more")
    close = [comparison for comparison in report.comparisons if comparison.status == "close"]
    if close:
        worst = max(close, key=lambda comparison: comparison.max_difference or 0.0)
        lines += page.wrapped("  largest   ", f"{worst.max_difference:.6g} within the tolerances, in {worst.name}")
    if report.logits is not None:
        lines += page.wrapped("  logits    ", report.logits.detail)
    lines += page.wrapped("", _verdict(report, len(bad)), "good" if report.is_equal else "bad")
    lines += _after_merge_check(report, page) if is_merge else _after_comparison(report, bad, page)
    return joined(lines)


def _verdict(report: VerifyReport, num_bad: int) -> str:
    total = len(report.comparisons)
    if report.is_equal:
        return f"the same: {_counted(total, 'tensor')}, {size_text(report.num_bytes)}"
    if not num_bad:
        return f"not the same: the logits, though {_counted(total, 'tensor')} are"
    return f"not the same: {_counted(num_bad, 'tensor')} of {total:,}"


def _after_merge_check(report: VerifyReport, page: Page) -> list[str]:
    output, checkpoint = str(report.checkpoint), str(report.reference)
    if report.is_equal:
        # An adapter is a repository of its own, and peft looks for it at the top of that.
        folder = output if report.has_model else str(report.checkpoint / ADAPTER_FOLDER)
        return page.command("next: ", ["merger", "upload"], [folder], ["REPO"])
    asked = flags_of(report.options)
    return page.command("next: ", ["merger", "merge"], [checkpoint], [output], *asked, ["--overwrite"])


def _after_comparison(report: VerifyReport, bad: Sequence[TensorComparison], page: Page) -> list[str]:
    if report.is_equal:
        return page.command("next: ", ["merger", "upload"], [str(report.reference)], ["REPO"])
    if any(comparison.status != "differs" for comparison in bad):
        return page.command("next: ", ["merger", "inspect"], [str(report.checkpoint)], ["--tensors", "*"])
    if bad:
        return page.wrapped("next: ", "if they may be that far apart, say how far by --atol and --rtol")
    return page.wrapped("next: ", "if they may be that far apart, say how far by --logits-atol")


def size_text(num_bytes: int) -> str:
    """Bytes for people, in powers of 1000 as disks and Hugging Face count."""
    size = num_bytes / 1000
    if size < 1:
        return _counted(num_bytes, "byte")
    for unit in ("kB", "MB", "GB"):
        if round(size, 2) < 1000:  # noqa: PLR2004 - the step between units
            return f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def _lora_text(lora: LoraSummary) -> str:
    ranks = " and ".join(map(str, lora.ranks))
    alpha = "not known" if lora.alpha is None else f"{lora.alpha:g}"
    parts = [f"{_counted(lora.num_modules, 'layer')}, r {ranks}, alpha {alpha}"]
    parts += ["rsLoRA"] if lora.use_rslora else []
    parts += ["DoRA"] if lora.use_dora else []
    if lora.modules_to_save:
        parts.append(f"trained copies of {', '.join(lora.modules_to_save)}")
    if len(lora.adapters) > 1:
        parts.append(f"adapters {', '.join(lora.adapters)}")
    if not lora.has_base:
        parts.append("adapters alone, without base weights")
    return "; ".join(parts)


def _mesh_text(mesh: MeshSummary) -> str:
    names = mesh.axis_names or tuple(f"axis {axis}" for axis in range(len(mesh.shape)))
    axes = " x ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    on = [_mesh_ranks_text(mesh.shape, mesh.ranks)]
    if len(mesh.copies) > _MAX_MESH_COPIES:
        on.append(f"{len(mesh.copies)} other sets of ranks")
    else:
        on += [_mesh_ranks_text(mesh.shape, ranks) for ranks in mesh.copies]
    return f"{axes} on {', and again on '.join(on)}: {_counted(mesh.num_tensors, 'tensor')}"


def _mesh_ranks_text(shape: Sequence[int], ranks: Sequence[int]) -> str:
    few = len(ranks) <= _MAX_MESH_RANKS
    if list(ranks) != sorted(ranks):
        if few and len(shape) > 1:
            return f"ranks {grid_text(shape, ranks)}"
        return f"ranks {', '.join(map(str, ranks[:_MAX_MESH_RANKS]))}{'' if few else ', ...'}"
    if few or ranks[-1] - ranks[0] == len(ranks) - 1:
        return ranks_text(ranks)
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]})"


def _listing(tensors: Sequence[TensorSummary], page: Page) -> list[str]:
    """A tensor per line in columns; where that is too wide, what it is goes to a line below its name."""
    about = [f"{tensor.dtype} {shape_text(tensor.shape)}  {tensor.placements}" for tensor in tensors]
    names = [printable(tensor.name) for tensor in tensors]
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {text}" for name, text in zip(names, about, strict=True)]
    if max(map(len, lines)) <= page.width:
        return lines
    return [
        line for name, text in zip(names, about, strict=True) for line in (f"  {name}", *page.wrapped("    ", text))
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
