"""Renderings of a configuration's sections: one line a key, and the tables of docs/config.md."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from openforge.config_reading import condition, is_list, section, show


def flatten(data: Any, where: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    if isinstance(data, dict) and (data or not where):
        items = [(f"{where}.{k}" if where else k, v) for k, v in data.items()]
    elif isinstance(data, list) and data and isinstance(data[0], dict):
        items = [(f"{where}[{i}]", v) for i, v in enumerate(data)]
    else:
        return {where: data}
    return {k: v for key, value in items for k, v in flatten(value, key).items()}


def key_rows(model: type[BaseModel], where: str = "", shown: frozenset[type[BaseModel]] = frozenset()) -> list[str]:
    """Rows of a markdown table, one a key; a section that stands at the top level too is spelt out there."""
    rows = []
    top = shown or frozenset(s for f in model.model_fields.values() if (s := section(f.annotation)))
    for key, field in model.model_fields.items():
        dotted = f"{where}.{key}" if where else key
        sub, doc = section(field.annotation), field.description or ""
        if needs := condition(field):
            doc += (
                " Only with "
                + ", ".join(
                    f"{k} = {' or '.join('null' if x is None else str(x) for x in v)}" for k, v in needs.items()
                )
                + "."
            )
        if sub is None:
            default = "required" if field.is_required() else f"`{show(field.default)}`"
            rows.append(f"| {dotted} | {_type(field.annotation)} | {default} | {doc} |")
            continue
        name = f"{dotted}[]" if is_list(field.annotation) else dotted
        none = "none" if field.default in (None, ()) else ""
        rows.append(f"| **{name}** | | {none} | {doc} |")
        if where == "" or sub not in top:
            rows += key_rows(sub, name, top)
    return rows


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(map(str, args))
    if origin is Annotated:
        return _type(args[0])
    if origin in (Union, types.UnionType):
        return " \\| ".join(_type(a) for a in args)
    if origin is tuple:
        return f"[{', '.join(_type(a) for a in args if a is not Ellipsis)}]"
    return "null" if annotation is type(None) else str(annotation.__name__)
