"""Changes the merger in telling ways, one at a time, and shows that the suite fails for each.

    python tests/mutants.py [NAME ...]      all, or those whose names hold one of the words

A mutant is one edit of one file, in a copy of the tree; the tests named with it must pass without the edit and fail
with it. One that survives is a missing test. Each names the fault that it stands for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, which stands once in `file`, becomes `new`; `tests` are the files that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "rows joined on the wrong dim",
        "merger/sharding.py",
        "        dim, count = placements[axis].dim, mesh_shape[axis]\n",
        "        count = mesh_shape[axis]\n"
        "        dim = 1 if len(ranges) > 1 and placements[axis].dim == 0 else placements[axis].dim\n",
        "tests/unit/test_sharding.py",
    ),
    Mutant(
        "pieces dealt evenly instead of by ceil",
        "merger/sharding.py",
        "return min(index * size, length), min((index + 1) * size, length)",
        "return index * length // count, (index + 1) * length // count",
        "tests/unit/test_sharding.py",
    ),
    Mutant(
        "split factor ignored",
        "merger/sharding.py",
        "cuts.insert(0, (axis, placement.split_factor or 1))",
        "cuts.insert(0, (axis, 1))",
        "tests/unit/test_sharding.py",
    ),
    Mutant(
        "padding not trimmed (S1)",
        "merger/sharding.py",
        "return Holding(sizes, padded_sizes, _pieces(ranges))",
        "return Holding(padded_sizes, padded_sizes, _pieces(ranges))",
        "tests/unit/test_properties.py tests/unit/test_sharding.py",
    ),
    Mutant(
        "a padded local is refused (S1)",
        "merger/sources/rank_part.py",
        "size in (exact, padded) for",
        "size == exact for",
        "tests/multirank/test_faults.py",
    ),
    Mutant(
        "any local size is taken (S11)",
        "merger/sources/rank_part.py",
        "    if fits or (0 in sizes and 0 in held.sizes):\n",
        "    if fits or not fits:\n",
        "tests/multirank/test_faults.py",
    ),
    Mutant(
        "ranks sorted as text (S7)",
        "merger/sources/rank_set.py",
        "by_size[int(match[1])][int(match[2])].append(path)",
        "by_size[int(match[1])][len(by_size[int(match[1])])].append(path)",
        "tests/unit/test_rank_set.py",
    ),
    Mutant(
        "missing ranks not noticed (L1)",
        "merger/sources/rank_set.py",
        "    if missing:\n",
        "    if missing and not by_size:\n",
        "tests/unit/test_rank_set.py",
    ),
    Mutant(
        "a copied rank file not noticed (S8)",
        "merger/sources/rank_part.py",
        "if entry.rank is not None and entry.rank != rank:",
        "if entry.rank is not None and entry.rank < 0:",
        "tests/multirank/test_faults.py",
    ),
    Mutant(
        "a permuted axis taken by coordinate in silence (S22)",
        "merger/sources/rank_part.py",
        "if axis is not None and shard_order is None:",
        "if axis is not None and shard_order is None and axis > 9:",
        "tests/multirank/test_layouts.py",
    ),
    Mutant(
        "group order is coordinate order (S22)",
        "merger/sharding.py",
        'if order == "coordinate":',
        "if order:",
        "tests/unit/test_sharding.py",
    ),
    Mutant(
        "the census skipped (S9)",
        "merger/sources/rank_files.py",
        "check_agreement(fqn, held) or check_census(fqn, held, world_size, stages)",
        "check_agreement(fqn, held)",
        "tests/multirank/test_faults.py",
    ),
    Mutant(
        "the agreement skipped",
        "merger/sources/rank_files.py",
        "check_agreement(fqn, held) or check_census(fqn, held, world_size, stages)",
        "check_census(fqn, held, world_size, stages)",
        "tests/multirank/test_faults.py",
    ),
    Mutant(
        "ranks that copy one another taken for stages of a pipeline (S9)",
        "merger/sources/stages.py",
        "        touched = [stage for stage in stages if not ranks.isdisjoint(stage)]\n",
        "        touched = []\n",
        "tests/unit/test_stages.py",
    ),
    Mutant(
        "a plain tensor expected on all ranks of a pipeline (S9)",
        "merger/sources/rank_files.py",
        "check_census(fqn, held, world_size, stages)",
        "check_census(fqn, held, world_size)",
        "tests/multirank/test_parallel.py",
    ),
    Mutant(
        "replicas never compared (S5)",
        "merger/planning.py",
        "            problems += differing_replicas(reader, stored, replica_pairs(stored, in_full=in_full))\n",
        "            problems += []\n",
        "tests/unit/test_merge.py",
    ),
    Mutant(
        "a NaN differs from itself (S4)",
        "merger/comparing.py",
        "        if left_bytes == right_bytes:\n            continue\n",
        "        if (left.view('f4') == right.view('f4')).all():\n            continue\n",
        "tests/unit/test_comparing.py",
    ),
    Mutant(
        "a hole written as zeros (S11)",
        "merger/checks.py",
        "    if sum(prod(chunk.sizes) for chunk in chunks) == prod(tensor.shape):\n",
        "    if sum(prod(chunk.sizes) for chunk in chunks) <= prod(tensor.shape):\n",
        "tests/unit/test_checks.py",
    ),
    Mutant(
        "an overlap taken (S11)",
        "merger/checks.py",
        "    if overlap is not None:\n",
        "    if overlap is not None and not chunks:\n",
        "tests/unit/test_checks.py",
    ),
    Mutant(
        "integers cast too (S13)",
        "merger/huggingface/outputs.py",
        "tensor.dtype.name not in _CASTABLE",
        "tensor.dtype.name in ()",
        "tests/unit/test_outputs.py",
    ),
    Mutant(
        "kept float32 cast all the same (S13)",
        "merger/huggingface/outputs.py",
        "    as_they_are = kept.union(chosen.pairs)\n",
        "    as_they_are = frozenset(chosen.pairs)\n",
        "tests/unit/test_outputs.py",
    ),
    Mutant(
        "unexpected tensors dropped in silence",
        "merger/huggingface/outputs.py",
        '[*ignored, *extra] if unexpected == "drop" else ignored',
        '[*ignored, *extra] if unexpected != "keep" else ignored',
        "tests/unit/test_outputs.py",
    ),
    Mutant(
        "a diverged tie written once (S12)",
        "merger/huggingface/ties.py",
        "    if not diverged:\n",
        "    if diverged or not diverged:\n",
        "tests/unit/test_names.py",
    ),
    Mutant(
        "wrapper names left (S14)",
        "merger/huggingface/names.py",
        'frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})',
        'frozenset({"_fsdp_wrapped_module", "_orig_mod"})',
        "tests/unit/test_names.py",
    ),
    Mutant(
        "a missing tensor not noticed",
        "merger/huggingface/names.py",
        "    if missing:\n",
        "    if missing and extra:\n",
        "tests/unit/test_names.py",
    ),
    Mutant(
        "checksums not verified (S21)",
        "merger/writer.py",
        "        if found != chunk.record.crc32:\n",
        "        if found != chunk.record.crc32 and found < 0:\n",
        "tests/unit/test_merge.py",
    ),
    Mutant(
        "the pickle's checksum not verified (S21)",
        "merger/sources/torch_zip.py",
        'raise ArchiveError(Problem("checksum", where, message))',
        "pass",
        "tests/unit/test_torch_zip.py",
    ),
    Mutant(
        "a shard that is not the rank's taken for granted (L13)",
        "merger/sources/shards.py",
        "    if found != promised:\n",
        "    if not promised and found:\n",
        "tests/unit/test_sharded_tensor.py",
    ),
    Mutant(
        "ranks that cut a ShardedTensor otherwise not noticed (L13)",
        "merger/checks.py",
        "entry.cut and entry.cut.rectangles)",
        "entry.cut and len(entry.cut.rectangles))",
        "tests/unit/test_sharded_tensor.py",
    ),
    Mutant(
        "the holders of shards not asked for (L13)",
        "merger/checks.py",
        "            expected |= {rank for rank in entry.cut.ranks if rank is not None}\n",
        "            expected |= {rank for rank in entry.cut.ranks if rank == entry.rank}\n",
        "tests/unit/test_sharded_tensor.py",
    ),
    Mutant(
        "flat parameters merged (L13)",
        "merger/sources/rank_files.py",
        'r"_?flat_param(_[0-9]+)?"',
        'r"flat_param(_[0-9]+)?"',
        "tests/multirank/test_sharded_tensors.py",
    ),
    Mutant(
        "a view of an old storage is all of it (L14)",
        "merger/sources/local_tensor.py",
        "start + storage.view[0] * unit, storage.view[1] * unit",
        "start, storage.view[1] * unit",
        "tests/unit/test_torch_legacy.py",
    ),
    Mutant(
        "an old file may end anywhere (L14)",
        "merger/sources/torch_legacy.py",
        "        if start + size > num_bytes:\n",
        "        if start > num_bytes:\n",
        "tests/unit/test_torch_legacy.py",
    ),
    Mutant(
        "the pickles of an old file end within its first bytes (L14)",
        "merger/sources/torch_legacy.py",
        "            if window == limit:\n",
        "            if window:\n",
        "tests/unit/test_torch_legacy.py",
    ),
    Mutant(
        "an expanded view as large as it likes (L11)",
        "merger/sources/local_tensor.py",
        "            if self._repeats_left < 0:\n",
        "            if self._repeats_left > 0:\n",
        "tests/unit/test_dtensor.py",
    ),
    Mutant(
        "a tensor of an extra state held for a weight",
        "merger/sources/state_dict.py",
        "extra_state(item) if is_extra else decoder.entry(item)",
        "decoder.entry(item)",
        "tests/unit/test_entries.py",
    ),
    Mutant(
        "the index counts elements (S18)",
        "merger/plan.py",
        "_index(files, sum(counted.values()), num_parameters)",
        "_index(files, sum(prod(tensor.source.shape) for tensor in tensors), num_parameters)",
        "tests/unit/test_merge.py",
    ),
    Mutant(
        "headers not aligned",
        "merger/plan.py",
        'header += b" " * (-len(header) % _HEADER_ALIGNMENT)',
        'header += b" " * 0',
        "tests/unit/test_plan.py",
    ),
    Mutant(
        "files filled in the order of saving",
        "merger/huggingface/outputs.py",
        "    return sorted(names, key=lambda name: (place.get(name, len(place)), _natural(name)))\n",
        "    return list(names)\n",
        "tests/unit/test_merge.py",
    ),
    Mutant(
        "the output built in place",
        "merger/places.py",
        'f".{target.name}.{end}" for end in ("merging", "lock", "replaced")',
        'f"{target.name}{end}" for end in ("", ".lock", ".replaced")',
        "tests/unit/test_publish.py",
    ),
    Mutant(
        "the output not brought to disk before the rename",
        "merger/publish.py",
        "                _sync_tree(place.staging)\n",
        "",
        "tests/unit/test_publish.py",
    ),
    Mutant(
        "config.json first into a mount point (L9)",
        "merger/places.py",
        "(_LAST.index(name) if name in _LAST else -1, name)",
        "name",
        "tests/unit/test_publish.py",
    ),
    Mutant(
        "no lock (S17)",
        "merger/publish.py",
        "fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/unit/test_publish.py",
    ),
    Mutant(
        "a failed run leaves its half (L9)",
        "merger/publish.py",
        "                _surely(lambda: recover(place))\n",
        "                pass\n",
        "tests/unit/test_publish.py",
    ),
    Mutant(
        "a stale target merged into (S16)",
        "merger/publish.py",
        "    if not overwrite:\n",
        "    if not overwrite and not names:\n",
        "tests/unit/test_merge.py",
    ),
    Mutant(
        "any global is a class (L11)",
        "merger/sources/unpickler.py",
        "raise UnsafePickleError(",
        "raise ArchiveError(",
        "tests/unit/test_unpickler.py",
    ),
    Mutant(
        "the coordinate of a mesh read backwards",
        "merger/sharding.py",
        "    return tuple(reversed(coordinate))\n",
        "    return tuple(coordinate)\n",
        "tests/unit/test_sharding.py",
    ),
    Mutant(
        "bands laid one row off",
        "merger/tensors.py",
        "            size = min(step, shape[dim - 1] - start)\n",
        "            size = min(step, max(1, shape[dim - 1] - start - 1))\n",
        "tests/unit/test_tensors.py",
    ),
    Mutant(
        "a hole drawn as if it were held (S11)",
        "merger/picture/regions.py",
        '        return "hole"\n',
        '        return "held"\n',
        "tests/unit/test_picture_regions.py",
    ),
    Mutant(
        "names drawn as markup (L11)",
        "merger/picture/svg.py",
        "return escape(shown(text))",
        "return shown(text)",
        "tests/unit/test_picture.py",
    ),
    Mutant(
        "gate and up, or experts, cut in the reverse order (S19)",
        "merger/huggingface/recording.py",
        "    return cuts\n",
        "    return cuts[::-1]\n",
        "tests/unit/test_recording.py",
    ),
    Mutant(
        "a part of a rank's piece read from the beginning of the piece (S19)",
        "merger/algebra.py",
        "chunk.byte_offset + (low - first) * chunk.strides[dim] * tensor.dtype.itemsize",
        "chunk.byte_offset",
        "tests/unit/test_recording.py",
    ),
    Mutant(
        "a weight turned by its shape alone (S19)",
        "merger/algebra.py",
        "strides=ordered(chunk.strides))",
        "strides=row_major_strides(ordered(chunk.sizes)))",
        "tests/unit/test_recording.py",
    ),
    Mutant(
        "rsLoRA scaled by alpha / r (S23)",
        "merger/huggingface/lora_settings.py",
        "(math.sqrt(rank) if self.use_rslora else rank)",
        "rank",
        "tests/unit/test_lora_fold.py",
    ),
    Mutant(
        "the alpha of single layers ignored (S23)",
        "merger/huggingface/lora_settings.py",
        "return next(_matching(self.alpha_pattern, layer), self.alpha)",
        "return self.alpha",
        "tests/unit/test_lora_fold.py",
    ),
    Mutant(
        "an alpha that is not stated taken for r (S15)",
        "merger/huggingface/lora_settings.py",
        'known = alpha if alpha is not None else stated.get("lora_alpha")',
        'known = alpha if alpha is not None else stated.get("lora_alpha", stated.get("r"))',
        "tests/unit/test_lora_settings.py",
    ),
    Mutant(
        "B A added to a square Conv1D without being turned (S23)",
        "merger/huggingface/lora_targets.py",
        'return None if is_turned is None else "transposed" if is_turned else "linear"',
        'return None if is_turned is None else "linear"',
        "tests/unit/test_lora_fold.py",
    ),
    Mutant(
        "the lengths of DoRA taken down the columns of square weights (S23)",
        "merger/folding.py",
        "torch.linalg.vector_norm(total.flatten(1), dim=1)",
        "torch.linalg.vector_norm(total.flatten(1), dim=0 if len(total) == total[0].numel() else 1)",
        "tests/unit/test_lora_fold.py",
    ),
    Mutant(
        "B A rounded before it is added (S15)",
        "merger/computing.py",
        "    return band.of(weight) + delta * fold.scaling\n",
        "    import torch\n\n"
        "    rounded = (delta * fold.scaling).to(getattr(torch, band.computation.dtype.name))\n"
        "    return band.of(weight) + rounded\n",
        "tests/unit/test_lora_fold.py",
    ),
    Mutant(
        "a trained copy left out of the folded model (S23)",
        "merger/huggingface/lora_fold.py",
        "changed: dict[str, StoredTensor] = dict(lora.trained)",
        "changed: dict[str, StoredTensor] = {}",
        "tests/unit/test_lora_fold.py",
    ),
    Mutant(
        "the adapter's own name left in those of its tensors (S15)",
        "merger/huggingface/lora_export.py",
        '(".weight" if is_layer else "")',
        '(".default.weight" if is_layer else "")',
        "tests/unit/test_lora_export.py",
    ),
    Mutant(
        "the alpha of single layers left out of the adapter's settings (S23)",
        "merger/huggingface/lora_export.py",
        '("alpha_pattern", settings.alpha_pattern),',
        '("alpha_pattern", None),',
        "tests/unit/test_lora_export.py",
    ),
    Mutant(
        "a value head left out of all files (S20)",
        "merger/planning.py",
        "    if outputs.value_head:\n",
        "    if outputs.value_head and not outputs.tensors:\n",
        "tests/unit/test_planning.py",
    ),
    Mutant(
        "a critic merged as what its config calls it (S20)",
        "merger/planning.py",
        "return options.value_model and not has_value_head(source.tensors)",
        "return False",
        "tests/unit/test_planning.py",
    ),
    Mutant(
        "a tie that came apart still told in config.json (S12)",
        "merger/side_planning.py",
        "tied=False if outputs.ties_broken else None)",
        "tied=None)",
        "tests/unit/test_planning.py",
    ),
    Mutant(
        "templates in a subfolder left behind (L8)",
        "merger/huggingface/side_files.py",
        '                    visit(entry, f"{place}/", above | {entry.resolve()})\n',
        '                    skipped.append(f"{place}/")\n',
        "tests/unit/test_side_files.py",
    ),
    Mutant(
        "another kind of type held for equal (S13)",
        "merger/verify.py",
        "castable = ours.dtype.is_floating and theirs.dtype.is_floating",
        "castable = True",
        "tests/unit/test_verify.py",
    ),
)


def main(words: Sequence[str]) -> int:
    """Runs the mutants that `words` choose; returns 1 if one survives or cannot be judged."""
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        sound = _copy(Path(folder) / "sound")
        # Without this, a test that fails anyway would pass for one that notices.
        checked = sorted({mutant.tests for mutant in chosen})
        broken = [
            tests
            for tests, noticed in zip(checked, pool.map(lambda t: _fails(sound, t), checked), strict=True)
            if noticed
        ]
        if broken:
            print(f"these fail without any mutant: {', '.join(broken)}")
            return 1
        verdicts = list(pool.map(lambda item: _judge(Path(folder) / str(item[0]), item[1]), enumerate(chosen)))
    width = max(len(mutant.name) for mutant in chosen)
    for mutant, verdict in zip(chosen, verdicts, strict=True):
        print(f"{mutant.name:{width}}  {verdict}")
    killed = verdicts.count("killed")
    print(f"{killed} of {len(chosen)} mutants killed")
    return 0 if killed == len(chosen) else 1


def _judge(tree: Path, mutant: Mutant) -> str:
    _copy(tree)
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return f"STALE: {mutant.file} holds its text {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new))
    noticed = _fails(tree, mutant.tests)
    shutil.rmtree(tree)
    return "killed" if noticed else "SURVIVED"


def _copy(tree: Path) -> Path:
    """The parts of the project that tests need."""
    tree.mkdir()
    for name in ("merger", "fixtures", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def _fails(tree: Path, tests: str) -> bool:
    """Whether pytest finds a failure; any other end than passed or failed is a mistake of this script."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests.split()]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    # 2 is an error while tests are collected: the mutant cannot even be imported, which is noticed too.
    assert done.returncode in (0, 1, 2), done.stdout + done.stderr
    return done.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
