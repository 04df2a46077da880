"""What the architecture that config.json names expects: names, shapes, ties, and what it keeps in float32.

The model is built by transformers on the meta device, so without weights, without network and without remote code.
`torch` and `transformers` are imported inside the functions only, and their advice is kept off the terminal. Versions
of transformers differ (4.51 to 5.x); what they differ in is asked of the built model, not of the version.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from merger.dtypes import BY_NAME
from merger.errors import ModelError, Problem
from merger.huggingface.architecture import Architecture
from merger.huggingface.heads import states_labels
from merger.huggingface.hub_layout import NotReversibleError, hub_layout

_OTHERWISE = (
    "Name a folder with the right config.json by --config DIR, or merge the tensors as they are, without this check, "
    "by --weights-only."
)

# Buffers that transformers stopped saving, and leaves unread where older files hold them, whatever the class declares
# (PreTrainedModel._adjust_missing_and_unexpected_keys): the ending of a buffer's name, and what is then not unexpected.
_FORMER_BUFFERS = (
    ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
    ("position_ids", r"(^|\.)position_ids$"),
)


def read_config(config_dir: Path) -> dict[str, Any]:
    """Config.json of a folder as a dictionary; a ModelError where there is none or where it is no JSON object."""
    path = config_dir / "config.json"
    if not path.is_file():
        raise ModelError(Problem("no-config", str(path), f"there is no such file. {_OTHERWISE}"))
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problem = Problem("bad-config", str(path), f"it cannot be read as JSON ({error}). {_OTHERWISE}")
        raise ModelError(problem) from error
    if not isinstance(config, dict):
        problem = Problem("bad-config", str(path), f"it holds no JSON object but {type(config).__name__}. {_OTHERWISE}")
        raise ModelError(problem)
    return config


def stated_dtype(config: Mapping[str, Any]) -> str | None:
    """The element type that a config.json states, as torch names it; None where it states none, or "auto".

    `dtype` goes before the older `torch_dtype`, and the top of the file before its `text_config`.

    >>> stated_dtype({"torch_dtype": "bfloat16"})
    'bfloat16'
    """
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            value = part.get(key)
            if isinstance(value, str) and value != "auto":
                return value.removeprefix("torch.")
    return None


def expected_architecture(config_dir: Path, *, is_value_model: bool = False) -> Architecture:
    """Builds the class that `config_dir`/config.json names on the meta device, and says what it expects.

    With `is_value_model` it is the class for token classification of the same type of model, with one label where the
    config does not say how many.

    Raises ModelError, naming the file, where there is no config.json, where it names no class or one that the
    installed transformers does not have, and where the class cannot be built from it.
    """
    config = read_config(config_dir)
    path = config_dir / "config.json"
    dtype = stated_dtype(config)
    if dtype is not None and dtype not in BY_NAME:
        raise ModelError(Problem("bad-config", str(path), f'it states the unknown dtype "{dtype}". {_OTHERWISE}'))
    with quiet():
        class_name = _value_class_name(config, path) if is_value_model else _class_name(config, path)
        model_class = _model_class(config, class_name, path)
        changes = {"num_labels": 1} if is_value_model and not states_labels(config) else {}
        try:
            model = _meta_model(model_class, config_dir, changes)
        except Exception as error:
            reason = f"{type(error).__name__}: {_one_line(str(error))}"
            message = f"{_transformers()} cannot build {class_name} from it ({reason}). {_OTHERWISE}"
            raise ModelError(Problem("bad-config", str(path), message)) from error
        return _architecture(model, class_name, dtype)


def model_class(config_dir: Path) -> Any:  # noqa: ANN401 - untyped upstream
    """The class that `config_dir`/config.json names. Raises ModelError as `expected_architecture` does."""
    config, path = read_config(config_dir), config_dir / "config.json"
    with quiet():
        return _model_class(config, _class_name(config, path), path)


def generation_config_complaint(config_dir: Path) -> str | None:
    """What the installed transformers has against generation_config.json when it is strict, in one line, or None."""
    if not (config_dir / "generation_config.json").is_file():
        return None
    with quiet():
        from transformers import GenerationConfig

        try:
            config = GenerationConfig.from_pretrained(str(config_dir), local_files_only=True)
            if "strict" in inspect.signature(config.validate).parameters:
                config.validate(strict=True)
                return None
            with warnings.catch_warnings(record=True) as caught:  # before `strict` came, faults were warnings
                warnings.simplefilter("always")
                config.validate()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the complaint
            return _one_line(str(error).split("\nIf you're using a pretrained model")[0])
    return _one_line(" ".join(str(warning.message) for warning in caught)) or None


def _class_name(config: Mapping[str, Any], path: Path) -> str:
    """The class that config.json names, without the prefix that training under FSDP1 leaves before it."""
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        message = f'it names no class under "architectures", such as ["Qwen2ForCausalLM"]. Add it. {_OTHERWISE}'
        raise ModelError(Problem("no-architecture", str(path), message))
    return names[0].removeprefix("FSDP")


def _value_class_name(config: Mapping[str, Any], path: Path) -> str:
    """The class for token classification: the one that config.json names, else that of its type of model."""
    names = config.get("architectures")
    if isinstance(names, list) and names and str(names[0]).endswith("ForTokenClassification"):
        return _class_name(config, path)
    from transformers.models.auto import modeling_auto

    name = modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(str(config.get("model_type")))
    if not isinstance(name, str):
        message = (
            f"{_transformers()} has no class for token classification of the model_type "
            f"{json.dumps(config.get('model_type'))}, which a value model is; leave --is-value-model out"
        )
        raise ModelError(Problem("no-value-class", str(path), message))
    return name


def _model_class(config: Mapping[str, Any], class_name: str, path: Path) -> Any:  # noqa: ANN401 - untyped upstream
    import transformers

    model_type = config.get("model_type")
    found = getattr(transformers, class_name, None)
    is_known_type = isinstance(model_type, str) and model_type in transformers.CONFIG_MAPPING
    if is_known_type and isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    if model_type is None:
        kind, message = "no-model-type", 'it has no "model_type", such as "qwen2". Add it.'
    elif config.get("auto_map"):
        kind = "remote-code"
        message = (
            f"{class_name} is not in {_transformers()} but in code that comes with the model (auto_map), which is not "
            "run here."
        )
    elif not is_known_type:
        kind = "unknown-model-type"
        message = f"{_transformers()} does not know the model_type {json.dumps(model_type)}; another version may."
    else:
        kind = "unknown-architecture"
        message = f"{_transformers()} has no model class {class_name}; another version may."
    raise ModelError(Problem(kind, str(path), f"{message} {_OTHERWISE}"))


def _meta_model(model_class: Any, config_dir: Path, changes: Mapping[str, Any]) -> Any:  # noqa: ANN401 - untyped upstream
    """The model without weights, as it is when loaded in bfloat16: what is then float32 is so by its own will."""
    import torch

    config = model_class.config_class.from_pretrained(str(config_dir), local_files_only=True, **changes)
    config._attn_implementation = "eager"  # noqa: SLF001 - no name or shape hangs on it; others ask for more packages
    _state_dtype(config, torch.bfloat16)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return model_class(config)
    finally:
        torch.set_default_dtype(before)


def _state_dtype(config: Any, dtype: Any) -> None:  # noqa: ANN401 - untyped upstream
    """Parts of a model may take their dtype from their own part of the config."""
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
    for key in getattr(config, "sub_configs", {}):
        if (part := getattr(config, key, None)) is not None:
            _state_dtype(part, dtype)


def _architecture(model: Any, class_name: str, dtype: str | None) -> Architecture:  # noqa: ANN401 - untyped upstream
    import torch

    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and name not in unsaved
    }
    # By construction, or because the class lists it (strictly, or for float16 only).
    built = {name for name, tensor in state.items() if tensor.dtype == torch.float32}
    strict = _named(state, getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    float16 = _named(state, getattr(model, "_keep_in_fp32_modules", None) or ())
    floating = {name for name, tensor in state.items() if tensor.is_floating_point()}

    ignored = {*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *map(re.escape, unsaved)}
    buffers = [name for name, _ in model.named_buffers()]
    ignored.update(regex for ending, regex in _FORMER_BUFFERS if any(name.endswith(ending) for name in buffers))
    architecture = Architecture(
        class_name=class_name,
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        ties=_ties(model, state),
        keep_fp32=frozenset((built | strict) & floating),
        keep_fp32_in_float16=frozenset(float16 & floating),
        ignore_unexpected=tuple(sorted(ignored)),
        dtype=dtype,
        buffers=frozenset(name for name, tensor in state.items() if not isinstance(tensor, torch.nn.Parameter)),
        conv1d=frozenset(
            f"{name}.weight" for name, module in model.named_modules() if type(module).__name__ == "Conv1D"
        ),
    )
    try:
        return replace(architecture, hub=hub_layout(model, architecture, state))
    except NotReversibleError as error:
        return replace(architecture, no_hub=str(error))


def _ties(model: Any, state: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:  # noqa: ANN401 - untyped upstream
    """Names that are one tensor object, the kept one first.

    Kept is what `_tied_weights_keys` (names or regular expressions; a list, later a mapping) does not list; where it
    lists them all, the last by name, as `save_pretrained` has it.
    """
    groups: dict[int, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(id(tensor), []).append(name)
    aliases = [
        f"{prefix}.{key}" if prefix else key
        for prefix, module in model.named_modules()
        for key in getattr(module, "_tied_weights_keys", None) or ()
    ]
    ties = []
    for names in groups.values():
        if len(names) > 1:
            kept = [name for name in names if not any(re.search(alias, name) for alias in aliases)]
            first = kept[0] if kept else max(names)
            ties.append((first, *(name for name in names if name != first)))
    return tuple(ties)


def _named(names: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Names that a `_keep_in_fp32_modules` list means: by whole components up to 4.x, by any part from 5 on."""
    import transformers

    by_part = int(transformers.__version__.split(".", 1)[0]) >= 5  # noqa: PLR2004 - the version where this changed
    regexes = [
        module.replace("*", ".*") if by_part else rf"(^|\.){module.replace('*', '.*')}($|\.)" for module in modules
    ]
    return {name for name in names if any(re.search(regex, name) for regex in regexes)}


def _transformers() -> str:
    import transformers

    return f"transformers {transformers.__version__}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps warnings, log and bars of transformers, which are for those who run the model, off the terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import logging

        before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(before)
            if had_bars:
                logging.enable_progress_bar()
