"""Which parameter of a model each wrapped layer changes, and how the product of its factors lies there.

Pure: it follows from names, shapes and settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from merger.checks import shape_text
from merger.dtypes import BY_NAME
from merger.errors import Problem
from merger.huggingface.lora import BASE_LAYER, Lora, LoraModule
from merger.huggingface.lora_settings import LoraSettings
from merger.operations import FoldLayout
from merger.tensors import StoredTensor


@dataclass(frozen=True, slots=True)
class Target:
    """A wrapped layer and the parameter of it that its factors change.

    `layout` says how their product lies in it, None where that cannot be told.
    """

    module: LoraModule
    name: str
    weight: StoredTensor
    rank: int
    layout: FoldLayout | None


def layouts_of(module: LoraModule, weight: tuple[int, ...]) -> tuple[FoldLayout, ...]:
    """The ways in which the product of a layer's factors may lie in a weight of this shape; none where it does not."""
    first, second = module.first.shape, module.second.shape
    if len(first) != len(second) or len(first) < 2 or first[0] != second[1]:  # noqa: PLR2004 - matrices at least
        return ()
    product, turned = (second[0], first[1]), (first[1], second[0])
    if len(first) > 2:  # noqa: PLR2004 - with kernels
        is_conv = weight == (second[0], *first[1:]) and all(size == 1 for size in second[2:])
        return ("conv",) if is_conv else ()
    if module.is_embedding:
        return ("transposed",) if weight == turned else ()
    if len(weight) == 3 and weight[0] and first[0] % weight[0] == 0:  # noqa: PLR2004 - experts, rows, columns
        fits: tuple[tuple[FoldLayout, tuple[int, int]], ...] = (("experts", product), ("transposed_experts", turned))
        return tuple(layout for layout, shape in fits if weight[1:] == shape)
    fits = (("linear", product), ("transposed", turned))
    return tuple(layout for layout, shape in fits if weight == shape)


def find_targets(
    lora: Lora,
    base: Mapping[str, StoredTensor],
    settings: LoraSettings | None = None,
    conv1d: Collection[str] | None = None,
) -> tuple[list[Target], list[Problem]]:
    """The parameter that each wrapped layer changes, and what is wrong with those that change none.

    What to do about it is not in the messages: it depends on where `base` is from.

    It is its weight, or where several parameters of a layer are wrapped the one whose shape fits. `settings` and
    `conv1d` say how square weights lie, which their shapes do not. `fan_in_fan_out` counts where `conv1d` is None only:
    it is one setting for all layers, and peft leaves in it what the last one that it wrapped asked for.
    """
    parameters: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in base.items():
        layer, _, parameter = name.rpartition(".")
        parameters.setdefault(layer, {})[parameter] = tensor
    options = {module.wrapper: _fitting(module, parameters.get(module.name, {})) for module in lora.modules}
    found: list[tuple[LoraModule, str, tuple[FoldLayout, ...]]] = []
    problems: list[Problem] = []
    taken: set[str] = set()
    # Those that leave no choice before those that do.
    for module in sorted(lora.modules, key=lambda module: (len(options[module.wrapper]), module.wrapper)):
        fits = {
            name: layouts for name, layouts in options[module.wrapper].items() if f"{module.name}.{name}" not in taken
        }
        if "weight" in fits:
            fits = {"weight": fits["weight"]}
        if len(fits) != 1:
            problems.append(_no_weight(module, parameters.get(module.name, {}), list(fits)))
            continue
        ((parameter, layouts),) = fits.items()
        taken.add(f"{module.name}.{parameter}")
        found.append((module, f"{module.name}.{parameter}", layouts))
    told = {layouts[0] for _, _, layouts in found if len(layouts) == 1}
    fan_in_fan_out = settings is not None and settings.stated("fan_in_fan_out") is True
    wrapped_parameters = tuple((settings.stated("target_parameters") if settings is not None else None) or ())
    # Where other matrices lie otherwise than the setting says, it is not that of all layers.
    is_contradicted = ("linear" if fan_in_fan_out else "transposed") in {
        layouts[0]
        for module, name, layouts in found
        if len(layouts) == 1 and not module.is_embedding and not _ends_in(name, wrapped_parameters)
    }
    targets = []
    for module, name, layouts in sorted(found, key=lambda one: one[1]):
        weight = base[name]
        if _ends_in(name, wrapped_parameters):
            # To a parameter peft adds the product as it is, whatever its layer makes of it.
            is_turned: bool | None = False
        elif conv1d is not None:
            is_turned = name in conv1d
        else:
            is_turned = None if is_contradicted else fan_in_fan_out
        layout = _layout(layouts, told, is_turned=is_turned)
        num_experts = weight.shape[0] if "experts" in layouts or "transposed_experts" in layouts else 1
        targets.append(Target(module, name, weight, module.first.shape[0] // num_experts, layout))
    return targets, problems


def ranks_of(targets: Iterable[Target]) -> list[tuple[LoraModule, str, int]]:
    """Layers with the names by which their settings are found, and their ranks."""
    return [(target.module, setting_name(target), target.rank) for target in targets]


def setting_name(target: Target) -> str:
    """By what patterns of rank and alpha are matched: the layer's name, or that of a parameter that is no weight."""
    return target.name.removesuffix(".weight")


def without_data(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    """Tensors of which only names and shapes are known, for `find_targets`."""
    return {name: StoredTensor(name, BY_NAME["float32"], shape, ()) for name, shape in shapes.items()}


def maybe_experts(lora: Lora, settings: LoraSettings) -> list[LoraModule]:
    """The layers whose factors may be those of several experts: then they have rank x experts rows, not rank.

    peft wraps one wrapper in another only where it wraps parameters, which is how it wraps experts; its settings name
    parameters too (`target_parameters`).
    """
    nested = {module.wrapper for module in lora.modules if BASE_LAYER in module.wrapper.split(".")}
    nested |= {wrapper.removesuffix(f".{BASE_LAYER}") for wrapper in nested}
    named = settings.stated("target_parameters")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    owners = tuple(f".{name.rpartition('.')[0]}" for name in names)

    def has_more_rows(module: LoraModule) -> bool:
        rank, rows = settings.rank_of(module.name), module.first.shape[0]
        return rank is not None and rows > rank and rows % rank == 0

    return [
        module
        for module in lora.modules
        if len(module.first.shape) == 2 and not module.is_embedding  # noqa: PLR2004 - a matrix
        if module.wrapper in nested or f".{module.name}".endswith(owners) or has_more_rows(module)
    ]


def unknown_experts(modules: Sequence[LoraModule]) -> Problem:
    """That layers may be experts, of which nothing says how many there are."""
    first = modules[0]
    others = f" (and {len(modules) - 1} more)" if len(modules) > 1 else ""
    message = (
        f"has factors of shape {shape_text(first.first.shape)} and {shape_text(first.second.shape)}, which may be "
        f"those of several experts in one parameter{others}: which one, and of what rank, is not known without the "
        "model. Put adapter_config.json beside the checkpoint, name a folder with the model's config by --config DIR, "
        "or the base model by --base DIR."
    )
    return Problem("unknown-experts", first.wrapper, message)


def wrong_ranks(ranks: Iterable[tuple[LoraModule, str, int]], settings: LoraSettings) -> list[Problem]:
    """That layers have another rank than is stated: then alpha may be that of another run too.

    `ranks` has layers with the name by which their settings are found, and the rank of their factors.
    """
    wrong = [
        (module, rank, stated, settings.file_of_rank(name))
        for module, name, rank in ranks
        if (stated := settings.rank_of(name)) is not None and stated != rank
    ]
    if not wrong:
        return []
    module, rank, stated, path = wrong[0]
    more = f" (and {len(wrong) - 1} more layers)" if len(wrong) > 1 else ""
    return [
        Problem(
            "lora-rank",
            module.wrapper,
            f"has factors of rank {rank}, but {path} states {stated}{more}; the settings are those of "
            "another run: put the right ones there, or remove them and give --lora-alpha N",
        )
    ]


def _layout(
    layouts: tuple[FoldLayout, ...], told: Collection[FoldLayout], *, is_turned: bool | None
) -> FoldLayout | None:
    """The one of several ways that is meant, None where that cannot be told.

    All experts of a model lie alike, and `told` has those that show it. `is_turned` says it of a square matrix.
    """
    if len(layouts) == 1:
        return layouts[0]
    if "linear" in layouts:
        return None if is_turned is None else "transposed" if is_turned else "linear"
    known = [layout for layout in layouts if layout in told]
    return known[0] if len(known) == 1 else None


def _ends_in(name: str, ends: Iterable[str]) -> bool:
    """Whether whole components of a name are one of `ends`. Source: `BaseTuner._inject_parameters` of peft."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _fitting(module: LoraModule, parameters: Mapping[str, StoredTensor]) -> dict[str, tuple[FoldLayout, ...]]:
    found = {name: layouts_of(module, tensor.shape) for name, tensor in parameters.items()}
    return {name: layouts for name, layouts in found.items() if layouts}


def _no_weight(module: LoraModule, parameters: Mapping[str, StoredTensor], fits: Sequence[str]) -> Problem:
    shapes = f"{shape_text(module.first.shape)} and {shape_text(module.second.shape)}"
    if len(fits) > 1:
        message = f"has factors of shape {shapes}, which fit several of its parameters: {', '.join(sorted(fits))}"
    elif parameters:
        held = ", ".join(f"{name} {shape_text(tensor.shape)}" for name, tensor in sorted(parameters.items()))
        message = f"has factors of shape {shapes}, which fit none of its parameters: {held}"
    else:
        message = f"has factors of shape {shapes}, but the base has no such layer"
    return Problem("no-base-weight", module.wrapper, message)
