"""Tells whether a chat template reads the content of a message as a text or as a list of parts.

Many templates of models with images only loop over parts: a text given as a string would silently
be missing in the prompt.

Source: vllm/renderers/hf.py, _detect_content_format; plain vLLM servers decide in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


def reads_parts(template: nodes.Template) -> bool:
    """Whether a template has a loop over the parts of a message's content."""
    messages = _names_of_messages(template)
    in_macros = dict[int, set[str]]()
    for macro in template.find_all(nodes.Macro):
        given = set(_arguments_with_content(template, macro, messages))
        for loop in macro.find_all(nodes.For):
            in_macros.setdefault(id(loop), set()).update(given)
    for loop in template.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in messages):
            return True
        # As in vLLM, a variable of this name has the content, and so does a macro's argument if the
        # macro is called with the content.
        names = in_macros.get(id(loop), {"content"})
        if isinstance(loop.iter, nodes.Name) and loop.iter.name in names:
            return True
    return False


def _names_of_messages(template: nodes.Template) -> list[str]:
    """Names of the variables that hold a message in loops over the messages."""
    lists = ["messages"]
    for name in lists:
        for assigned in template.find_all(nodes.Assign):
            target = assigned.target
            if isinstance(target, nodes.Name) and _reads(assigned.node, name):
                lists += [target.name] if target.name not in lists else []
    return [
        loop.target.name
        for loop in template.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    ]


def _arguments_with_content(
    template: nodes.Template, macro: nodes.Macro, messages: list[str]
) -> Iterator[str]:
    """Yields the arguments of a macro that are the content of a message in one of its calls."""
    names = [argument.name for argument in macro.args]
    for call in template.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = list(zip(names, call.args, strict=False))
        given += [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in names]
        for name, value in given:
            if any(_reads(value, message, "content") for message in messages):
                yield name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is a variable, or one of its keys, possibly filtered or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getitem):
            has_key = isinstance(node.arg, nodes.Const) and node.arg.value == key
        else:
            has_key = isinstance(node, nodes.Getattr) and node.attr == key
        if not has_key or not isinstance(node, nodes.Getitem | nodes.Getattr):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
