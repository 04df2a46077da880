"""Reports as text for people: lines of at most 80 columns that read the same in a terminal and in a log."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from merger.adapters import LoraSummary
from merger.checks import grid_text, limit_problems, ranks_text, shape_text
from merger.huggingface.hub import UploadReport
from merger.inspect import InspectReport, MeshSummary, TensorSummary
from merger.report import MergeReport
from merger.verify import TensorComparison, VerifyReport

_WIDTH = 80
# How many tensors that differ are listed before the rest are counted.
_MAX_DIFFERENCES = 20
# How many ranks of a mesh are written out.
_MAX_MESH_RANKS = 16
# Of how many copies of a mesh the ranks are written out.
_MAX_MESH_COPIES = 3


def merge_text(report: MergeReport, *, is_last: bool = True) -> str:
    """What a merge did, and, where nothing else `is_last`, what to do next."""
    would = "would merge" if report.dry_run else "merged"
    files = _counted(len(report.weight_files), "file")
    lines = [
        f"{would} {_counted(report.world_size, 'rank')} of {report.checkpoint}",
        f"  into      {report.output}",
        *_wrapped("  tensors   ", f"{report.num_tensors:,}: {_counts(report.dtypes)}"),
        f"  weights   {size_text(report.num_bytes)} in {files}",
    ]
    if report.lora is not None:
        lines += _wrapped("  lora      ", _lora_text(report.lora))
    if report.casts:
        lines += _wrapped("  cast      ", _counts(report.casts))
    if report.side_files:
        lines += _wrapped("  beside    ", ", ".join(report.side_files))
    for note in report.notes:
        lines += _wrapped("  note      ", note)
    if report.dry_run:
        lines.append("nothing was written (--dry-run)")
    elif is_last:
        lines.append(
            f"next: merger verify {shlex.quote(str(report.output))} --source {shlex.quote(str(report.checkpoint))}"
        )
    return _text(lines)


def upload_text(report: UploadReport) -> str:
    """What was uploaded, and where it is now."""
    lines = [
        f"uploaded {_counted(report.num_files, 'file')}, {size_text(report.num_bytes)}, of {report.output}",
        f"  to        {report.url}",
        f"  commit    {report.commit}",
    ]
    if report.deleted:
        lines += _wrapped("  deleted   ", ", ".join(report.deleted))
    model = f'"{report.repo}"' + (f', revision="{report.revision}"' if report.revision != "main" else "")
    lines.append(f"next: AutoModel.from_pretrained({model})")
    return _text(lines)


def inspect_text(report: InspectReport) -> str:
    """What a checkpoint is."""
    lines = [
        str(report.checkpoint),
        f"  format    {report.format}",
        f"  ranks     {report.world_size} ({_counted(report.num_files, 'file')}, {size_text(report.file_bytes)})",
    ]
    for mesh in report.meshes:
        lines += _wrapped("  mesh      ", _mesh_text(mesh))
    lines.append(
        f"  tensors   {report.num_tensors:,}, {report.num_elements:,} elements, {size_text(report.num_bytes)} merged"
    )
    lines += _wrapped("  dtypes    ", _counts(report.dtypes) or "none")
    lines += _one_by_one("  placed    ", [f"{number:,} {name}" for name, number in report.placements.items()])
    if report.lora is not None:
        lines += _wrapped("  lora      ", _lora_text(report.lora))
    lines.append(f"  config    {report.config_dir or 'none'}")
    for note in report.notes:
        lines += _wrapped("  note      ", note)
    if report.picture is not None:
        lines.append(f"  picture   {report.picture}")
    if report.tensors:
        lines += ["", *_listing(report.tensors)]
    if report.problems:
        lines += ["", f"{_counted(len(report.problems), 'fault')}; it cannot be merged as it is:"]
        for problem in limit_problems(report.problems):
            lines += _wrapped("  - ", str(problem))
    else:
        lines.append("no fault found (headers only; a merge also verifies the checksums of all data)")
    return _text(lines)


def verify_text(report: VerifyReport) -> str:
    """How a checkpoint compares with a reference."""
    lines = [f"{report.checkpoint}", f"  against   {report.reference}"]
    for note in report.notes:
        lines += _wrapped("  note      ", note)
    by_status: dict[str, list[TensorComparison]] = {}
    for comparison in report.comparisons:
        by_status.setdefault(comparison.status, []).append(comparison)
    rounded = Counter(comparison.detail for comparison in by_status.get("equal", []) if comparison.detail != "equal")
    for detail, number in rounded.items():
        lines += _wrapped("  note      ", f"{_counted(number, 'tensor')}: {detail}")
    lines.append(f"  compared  {_counts({status: len(found) for status, found in by_status.items()}) or 'nothing'}")
    bad = [comparison for comparison in report.comparisons if comparison.status not in ("equal", "close")]
    for comparison in bad[:_MAX_DIFFERENCES]:
        lines += _wrapped("  - ", f"{comparison.name}: {comparison.detail}")
    if len(bad) > _MAX_DIFFERENCES:
        lines.append(f"  - and {len(bad) - _MAX_DIFFERENCES} more")
    close = [comparison for comparison in report.comparisons if comparison.status == "close"]
    if close:
        worst = max(close, key=lambda comparison: comparison.max_difference or 0.0)
        lines += _wrapped("  largest   ", f"{worst.max_difference:.6g} within the tolerances, in {worst.name}")
    if report.logits is not None:
        lines += _wrapped("  logits    ", report.logits.detail)
    lines.append(_verdict(report, len(bad)))
    return _text(lines)


def _verdict(report: VerifyReport, num_bad: int) -> str:
    total = len(report.comparisons)
    if report.is_equal:
        return f"the same: {_counted(total, 'tensor')}, {size_text(report.num_bytes)}"
    if not num_bad:
        return f"not the same: the logits, though {_counted(total, 'tensor')} are"
    return f"not the same: {_counted(num_bad, 'tensor')} of {total:,}"


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


def _listing(tensors: Sequence[TensorSummary]) -> list[str]:
    """A tensor per line in columns; where that is too wide, what it is goes to a line below its name."""
    about = [f"{tensor.dtype} {shape_text(tensor.shape)}  {tensor.placements}" for tensor in tensors]
    width = max(len(tensor.name) for tensor in tensors)
    lines = [f"  {tensor.name:{width}}  {text}" for tensor, text in zip(tensors, about, strict=True)]
    if max(map(len, lines)) <= _WIDTH:
        return lines
    return [line for tensor, text in zip(tensors, about, strict=True) for line in (f"  {tensor.name}", f"    {text}")]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(map(printable, lines))


def printable(line: str) -> str:
    """Escapes what a terminal would obey rather than show: names come from files that are not to be trusted."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _one_by_one(first: str, items: Sequence[str]) -> Iterable[str]:
    """All items on one line, or where they are too long each on its own."""
    joined = first + (", ".join(items) or "none")
    if len(joined) <= _WIDTH:
        return [joined]
    rest = " " * len(first)
    return [line for at, item in enumerate(items) for line in _wrapped(rest if at else first, item)]


def _wrapped(first: str, text: str) -> Iterable[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
