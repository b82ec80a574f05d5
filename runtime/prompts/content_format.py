"""Tells whether a chat template reads the content of a message as a text or as a list of parts.

Many templates of models with images only loop over parts: a text given as a string would silently
be missing in the prompt.

Source: vllm/renderers/hf.py, _detect_content_format; plain vLLM servers decide in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes


class _NoPlainName(Exception):
    """A loop or an assignment has another target than a plain name, such as `a, b` or `ns.a`."""


def reads_parts(template: nodes.Template) -> bool:
    """Whether a template has a loop over the parts of a message's content.

    As in vLLM, a template reads texts if a list of messages, a message, or a part of a content is
    assigned to another target than a plain name.
    """
    try:
        return _has_loop_over_parts(template)
    except _NoPlainName:
        return False


def _has_loop_over_parts(template: nodes.Template) -> bool:
    """Like `reads_parts`, but raises _NoPlainName for a target that is no plain name."""
    messages = _names_of_messages(template)
    in_macros = dict[int, set[str]]()
    for macro in template.find_all(nodes.Macro):
        given = set(_arguments_with_content(template, macro, messages))
        for loop in macro.find_all(nodes.For):
            # A loop in nested macros belongs to the innermost one that is given a content.
            in_macros[id(loop)] = given or in_macros.get(id(loop), set())
    for loop in template.find_all(nodes.For):
        # As in vLLM, a variable of this name has the content, and so does a macro's argument if the
        # macro is called with the content.
        names = in_macros.get(id(loop), {"content"})
        is_named = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_named or any(_reads(loop.iter, name, "content") for name in messages):
            # The first such loop decides.
            return bool(_plain_name(loop.target))
    return False


def _names_of_messages(template: nodes.Template) -> list[str]:
    """Names of the variables that hold a message in loops over the messages.

    Raises:
        _NoPlainName: A list of messages, or a message, has another target than a plain name.
    """
    lists = ["messages"]
    for name in lists:
        for assigned in template.find_all(nodes.Assign):
            if _reads(assigned.node, name):
                target = _plain_name(assigned.target)
                lists += [target] if target not in lists else []
    return [
        _plain_name(loop.target)
        for loop in template.find_all(nodes.For)
        if any(_reads(loop.iter, name) for name in lists)
    ]


def _plain_name(target: nodes.Node) -> str:
    """Returns the name of a variable that a loop or an assignment sets."""
    if not isinstance(target, nodes.Name):
        raise _NoPlainName
    return target.name


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
