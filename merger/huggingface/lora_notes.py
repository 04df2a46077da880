"""What a merge says of the adapters that it found: what it went by, what was folded, where the adapter is."""

from __future__ import annotations

from merger.errors import listed
from merger.huggingface.lora import Lora
from merger.huggingface.lora_export import FOLDER
from merger.huggingface.lora_fold import Folded
from merger.huggingface.lora_settings import LoraSettings


def settings_notes(lora: Lora, settings: LoraSettings, alpha: float | None) -> list[str]:
    """What was gone by where the settings leave room: whether rsLoRA was used, which alpha, which adapter."""
    notes = []
    if settings.path is not None and settings.config is None and "use_rslora" not in settings.stated_in:
        notes.append(
            f"{settings.path.name} does not say whether rsLoRA was used, so the scale is alpha / r; an "
            "adapter_config.json beside it would say"
        )
    if alpha is not None and settings.path is not None:
        but = ", but where its alpha_pattern states others for single layers" if settings.alpha_pattern else ""
        notes.append(f"alpha is {settings.alpha:g}, as asked, whatever {settings.path.name} states{but}")
    if len(lora.adapters) > 1:
        notes.append(f"adapters left out: {', '.join(lora.adapters[1:])}")
    return notes


def fold_notes(lora: Lora, settings: LoraSettings, done: Folded) -> list[str]:
    """What was folded, and how it was scaled."""
    ranks = " and ".join(f"{rank}" for rank in done.ranks)
    kind = "DoRA" if any(module.magnitude is not None for module in lora.modules) else "LoRA"
    root = ", scaled by alpha / sqrt(r)" if settings.use_rslora else ""
    notes = [f"{kind} folded into {len(lora.modules)} layers (r {ranks}, alpha {settings.alpha:g}{root})"]
    if done.trained:
        notes.append(
            f"trained copies (modules_to_save) written in the places of what they replace: {listed(done.trained)}"
        )
    notes += [
        f"{name} was tied to {other}, of which only the other was trained; it is written as the base had it"
        for name, other in done.filled.items()
    ]
    return notes


def export_notes(settings: LoraSettings, *, is_folded: bool) -> list[str]:
    """Where the adapter is, and what it fits."""
    notes = []
    if is_folded:
        notes.append(f"the adapter itself is in {FOLDER}/, for use on the base model: here it is folded in already")
    else:
        notes.append(f"the adapter is in {FOLDER}/")
    if settings.changes_base:
        notes.append(
            f"training began with base weights that {settings.stated('init_lora_weights')} changed, so the adapter "
            "fits only those of this checkpoint, which --lora base writes"
        )
    return notes
