"""Where no layout is possible: the reason, and the nearest change that would help. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum

from resilio_hpc.autoparallel.base.hardware import Machine, machines
from resilio_hpc.autoparallel.base.layout import Recompute
from resilio_hpc.autoparallel.search.layout_space import Space, context_degrees, divisors, tensor_degrees
from resilio_hpc.autoparallel.search.ranking import Training, find
from resilio_hpc.autoparallel.search.search import Found

EVERYTHING = Space(zero=(0, 1, 2, 3), recompute=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
MOST_NODES = 4096


def why_none(training: Training, machine: Machine, gpus: int, whole: Space | None = None, node_gpus: int = 0) -> str:
    """Return the reason for ``gpus`` GPUs on which a search found nothing.

    ``whole``: the framework's layouts, without the user's own limits; ``node_gpus``: of a whole node, where the machine
    is a part of one.
    """
    found = find(training, machine, gpus)
    if found.looked_at:
        return _too_large(training, machine, gpus, found, whole or training.space)
    return _no_layout(training, machine, gpus, node_gpus or machine.node_gpus)


# -- nothing fits ------------------------------------------------------------------------------------------------------


def _too_large(training: Training, machine: Machine, gpus: int, found: Found, whole: Space) -> str:
    needs = (
        f"none of {found.looked_at:,} layouts fits: the smallest, {found.smallest}, needs "
        f"{found.least_excess / 1e9:.1f} GB more per GPU than the {machine.memory_gb:g} GB of {machine.gpu}"
    )
    if training.headroom:
        needs += f", of which {training.headroom:.0%} stay free (--headroom)"
    other = _one_limit_less(training, machine, gpus, whole) or _other_space(training, machine, gpus, whole)
    ways = [way for way in (other, _more_gpus(training, machine, gpus), _other_gpu(training, machine, gpus)) if way]
    return f"{needs}; {'; '.join(ways) if ways else f'no number of GPUs up to {MOST_NODES} nodes helps either'}"


def _one_limit_less(training: Training, machine: Machine, gpus: int, whole: Space) -> str:
    """Return the first of the user's limits without which something fits, the cheapest to give up first."""
    for name, space in _wider(training.space, whole):
        found = find(replace(training, space=space), machine, gpus)
        if found.cost.iteration.size:
            layout = found.layouts.row(0)
            value = getattr(layout, name)
            text = value.name.lower() if isinstance(value, IntEnum) else value
            return f"with --{name.replace('_', '-')} {text} it would fit ({layout})"
    return ""


def _wider(space: Space, whole: Space) -> Iterator[tuple[str, Space]]:
    """Yield the space without one limit, and that limit."""
    if space.recompute != whole.recompute:
        yield "recompute", replace(space, recompute=whole.recompute)
    for name in ("micro_batch", "vpp", "ep", "etp", "tp", "pp"):
        if name in space.only and name not in whole.only:
            yield name, replace(space, only={key: value for key, value in space.only.items() if key != name})
    if space.zero != whole.zero:
        yield "zero", replace(space, zero=whole.zero)
    if space.offload != whole.offload:
        yield "offload", replace(space, offload=whole.offload)


def _other_space(training: Training, machine: Machine, gpus: int, whole: Space) -> str:
    """Return layouts outside those that were asked for, on the same GPUs."""
    for space, how in ((replace(whole, cp=training.space.cp), "without these limits"), (EVERYTHING, "--framework any")):
        found = find(replace(training, space=space), machine, gpus)
        if found.cost.iteration.size:
            return f"{found.layouts.row(0)} would fit ({how})"
    return ""


def _more_gpus(training: Training, machine: Machine, gpus: int) -> str:
    for count in _larger(machine.node_gpus, gpus):
        if find(training, machine, count).cost.iteration.size:
            return f"the smallest number of GPUs that fits is {count}"
    return ""


def _larger(per_node: int, gpus: int) -> Iterator[int]:
    """Yield whole nodes: every number for the first hundred of them; then in steps of 5 %."""
    nodes = gpus // per_node + 1
    while nodes <= MOST_NODES:
        yield nodes * per_node
        nodes += max(1, (nodes - 100) // 20)


def _other_gpu(training: Training, machine: Machine, gpus: int) -> str:
    larger = sorted(
        (one for one in machines().values() if one.memory_gb > machine.memory_gb), key=lambda m: m.memory_gb
    )
    for one in larger:
        trial = replace(one, node_gpus=machine.node_gpus, domain_gpus=machine.domain_gpus)
        if find(training, trial, gpus).cost.iteration.size:
            return f"{one.gpu} ({one.memory_gb:g} GB each) would do"
    return ""


# -- no layout at all --------------------------------------------------------------------------------------------------


def _no_layout(training: Training, machine: Machine, gpus: int, node_gpus: int) -> str:
    """Return that the batch cannot be shared, or that the given degrees are impossible."""
    space, model = training.space, training.model
    tp = space.only.get("tp", 1)
    if model.heads % tp:
        return f"tp {tp} does not divide {model.heads} attention heads: it can be {_words(divisors(model.heads))}"
    keys = model.kv_heads or model.heads
    if keys > 1 and keys % tp:
        return f"tp {tp} does not divide {keys} groups of keys: it can be {_words(divisors(keys))}"
    if model.ffn % tp:
        return f"tp {tp} does not divide the MLP's width of {model.ffn}"
    fixed = 1
    for name in ("tp", "pp"):
        fixed *= space.only.get(name, 1)
    fixed *= space.cp[0] if len(space.cp) == 1 else 1
    if gpus % fixed:
        near = _near(gpus, fixed)
        return f"{gpus} GPUs are no multiple of {fixed} (tp x pp x cp, as given): the nearest numbers are {near}"
    if tp > machine.domain_gpus:
        return f"tp {tp} does not fit into the {machine.domain_gpus} GPUs that share NVLink"
    if space.only.get("pp", 1) > model.layers:
        return f"pp {space.only['pp']} is more than the {model.layers} layers"
    if space.cp and not context_degrees(model, space):
        return f"cp {space.cp[0]}: {2 * space.cp[0]} pieces do not divide sequences of {model.seq} tokens"
    if space.only.get("pp", 1) > 1 and not set(space.zero) & set(space.pipeline_zero):
        return "ZeRO stages 2 and 3 do not go with a pipeline, which keeps its gradients: --pp 1, or another stage"
    if space.only.get("vpp", 1) > 1:
        return (
            f"interleaving in {space.only['vpp']} needs layers that pp x vpp divides, and whole rounds of micro-batches"
        )
    return _batch(training, machine, gpus, node_gpus)


def _batch(training: Training, machine: Machine, gpus: int, node_gpus: int) -> str:
    batch = training.global_batch
    replicas = sorted(set(_replicas(training, machine, gpus)))
    if find_any(training, machine, gpus):
        fixed = ", ".join(f"{name} {value}" for name, value in training.space.only.items())
        return f"no layout of {gpus} GPUs has {fixed or 'what is asked for'} together with a batch of {batch}"
    step = min(replicas) * training.space.only.get("micro_batch", 1)
    given = training.space.only.get("micro_batch")
    micro = f" in micro-batches of {given}" if given else ""
    near = min(
        (
            count
            for count in range(max(1, gpus // 2), 2 * gpus + 1)
            if (count <= node_gpus or count % node_gpus == 0) and find_any(training, machine, count)
        ),
        key=lambda count: abs(count - gpus),
        default=None,
    )
    text = (
        f"a global batch of {batch} cannot be split over the {_words(replicas)} replicas that {gpus} GPUs can hold"
        f"{micro}: the nearest batches are {_near(batch, step)}"
    )
    return f"{text}, the nearest number of GPUs is {near}" if near else text


def find_any(training: Training, machine: Machine, gpus: int) -> bool:
    """Return whether some layout of so many GPUs shares the batch."""
    micro = training.space.only.get("micro_batch", 1)
    return any(training.global_batch % (dp * micro) == 0 for dp in _replicas(training, machine, gpus))


def _replicas(training: Training, machine: Machine, gpus: int) -> Iterator[int]:
    """Yield the possible data-parallel degrees, for any batch."""
    model, space = training.model, training.space
    for tp in tensor_degrees(model, gpus, space, machine.domain_gpus):
        for pp in divisors(gpus // tp):
            if pp <= model.layers and space.may("pp", pp):
                yield from (
                    gpus // tp // pp // cp for cp in context_degrees(model, space) if (gpus // tp // pp) % cp == 0
                )


def _near(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} and {below + step}" if below else str(step)


def _words(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1][:8])} or {texts[-1]}"
