"""Inputs of captured graphs named as the user names them: `input_ids`, `layers_0_norm1_weight`.

    primals_3, arg2_1      →      layers_0_norm1_weight, input_ids

Decisions, drawings and errors write the names of nodes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from tilewright.records.case import named_leaves

_CONTAINER = re.compile(r"_(?:modules|parameters|buffers)_")
_TRACED = re.compile(r"primals_\d+|arg\d+_1")
# By these AOTAutograd recognises placeholders that are no inputs of the program.
_RESERVED = ("tangents", "bwd_", "fwd_")


def argument_names(
    function: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[int, str]:
    """For the `id` of each tensor among the arguments of a call what the function calls it.

    >>> import torch
    >>> x, y, z = torch.ones(3, 1)
    >>> names = argument_names(lambda batch, *states, scale: batch, [{"image": x}, (y, 2)], {"scale": z})
    >>> [names[id(tensor)] for tensor in (x, y, z)]
    ['batch_image', 'states_0_0', 'scale']
    """
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        bound = inspect.signature(called).bind(*positional, **keywords)
    # A builtin has no signature, and a call that does not fit fails by itself.
    except (TypeError, ValueError):
        return {}
    names: dict[int, str] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        given = value.items() if kind is inspect.Parameter.VAR_KEYWORD else [(name, value)]
        names |= {id(leaf): _identifier(path) for own, one in given for path, leaf in named_leaves(one, own)}
    return names


def _identifier(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_")


def named_inputs(module: fx.GraphModule) -> list[str]:
    """Name the nodes of the inputs of a graph that Dynamo captured; returns the names."""
    names = []
    for node in module.graph.find_nodes(op="placeholder"):
        names.append(known_as(str(node.target)))
        node._rename(names[-1])
    return names


def set_argument_names(module: fx.GraphModule, names: Mapping[int, str]) -> None:
    """Name inputs of a graph that Dynamo captured, by their places: Dynamo knows them as arguments of a wrapper."""
    for place, node in enumerate(module.graph.find_nodes(op="placeholder")):
        if place in names:
            node.target = names[place]
    module.recompile()


def known_as(target: str) -> str:
    """What the user calls an input of Dynamo's graph.

    >>> known_as("L_self_modules_layers_modules_0_modules_norm1_parameters_weight_")
    'layers_0_norm1_weight'
    >>> known_as("L_input_ids_"), known_as("L_batch_image_"), known_as("image")
    ('input_ids', 'batch_image', 'image')
    """
    inside = re.sub(r"^[LG]_(.*?)_?$", r"\1", target)
    _, *parts = _CONTAINER.split(inside)
    return "_".join(parts) or inside


def rename_inputs(graph: fx.Graph, names: Sequence[str]) -> None:
    """Give the inputs of a graph that AOTAutograd traced these names; it may have inputs of its own before them."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if _TRACED.fullmatch(node.name)]
    if not names or len(inputs) < len(names):
        return
    for node, name in zip(inputs[len(inputs) - len(names) :], names, strict=True):
        if name.isidentifier() and not any(word in name for word in _RESERVED):
            rename(node, name)


def rename(node: fx.Node, name: str) -> None:
    """Give a node this name, with a number behind it if the graph has one of that name."""
    node._rename(name)
