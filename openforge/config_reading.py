"""Reading a configuration file: YAML without traps, keys checked against sections, origins of values.

Here are also what all sections are made of: their base and their types of numbers and texts.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined


class ConfigError(ValueError):
    """One sentence: the file, the key, and what would be right."""


class Section(BaseModel):
    """A mapping of keys: none but its own, no value converted, and nothing changed once it is read."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
Text = Annotated[str, Field(min_length=1)]
# torch and numpy take 32 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32)]


def only_if(**conditions: Any) -> dict[str, Any]:
    """Marks a key as effective only while sibling keys have the given values; else it is an error."""
    return {"only_if": {k: list(v) if isinstance(v, (list, tuple)) else [v] for k, v in conditions.items()}}


# ---- YAML ----
class _Loader(yaml.SafeLoader):
    """Scalars as YAML 1.2 reads them, and as people of this field write them.

    YAML 1.1 reads `no` as false, 1e-5 as a string, 010 as 8 and 1:30 as 90. Here the first and the last two
    are strings, so that a typed key refuses them, and 1e-5 is a number.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_FLOAT = r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan"
for _tag, _pattern, _first in (
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        # Of two equal keys YAML would silently keep the last.
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise ConfigError(f"key {key.value!r} stands twice (line {key.start_mark.line + 1})")
            seen.add(key.value)
    loader.flatten_mapping(node)
    for key, _ in node.value:
        # A key is text, whatever it looks like: it is shown as it was written.
        if isinstance(key, yaml.ScalarNode):
            key.tag = "tag:yaml.org,2002:str"
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_yaml(path: Path, label: str | None = None) -> dict[str, Any]:
    """A YAML mapping without repeated keys; `label` names the file in sentences.

    Raises:
        ConfigError: the file does not exist, cannot be read, is not YAML, or holds something else; the place
            is named.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml"))) or "none"
        raise ConfigError(f"{label or path} does not exist; configurations there: {known}") from None
    except OSError as e:
        raise ConfigError(f"{label or path} cannot be read: {e.strerror}") from None
    except ConfigError as e:
        raise ConfigError(f"{label or path}: {e}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{label or path} is not readable YAML: {' '.join(str(e).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{label or path} must hold a mapping of keys, not {'nothing' if data is None else show(data)}"
        )
    return data


# ---- keys ----
def section(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `Server | None` or `tuple[Cell, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in get_args(annotation):
        found = section(arg)
        if found is not None:
            return found
    return None


def condition(field: Any) -> dict[str, list[Any]]:
    """The `only_if` of a field: allowed values by sibling key."""
    extra = field.json_schema_extra
    found = extra.get("only_if", {}) if isinstance(extra, dict) else {}
    return dict(found)


def check(model: type[BaseModel], data: Any, where: str, source: str) -> None:
    """Refuse unknown and ineffective keys, before pydantic sees the data.

    Raises:
        ConfigError: one sentence with the nearest known key.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{source}: {where or 'the file'} must be a mapping of keys, not {show(data)}")
    fields = model.model_fields
    for key, value in data.items():
        dotted = f"{where}.{key}" if where else str(key)
        if key not in fields:
            raise ConfigError(f"{source}: unknown key {dotted!r}{_nearest(str(key), where, fields)}")
        for sibling, allowed in condition(fields[key]).items():
            actual = data.get(sibling, fields[sibling].default)
            # A sibling that is wrong itself is what there is to say.
            choices = _choices(fields[sibling].annotation)
            if choices is not None and actual not in choices:
                continue
            if actual is not PydanticUndefined and actual not in allowed:
                beside = f"{where}.{sibling}" if where else sibling
                raise ConfigError(
                    f"{source}: key {dotted!r} has no effect while {beside} is "
                    f"{show(actual)}; remove it or set {sibling} to {' or '.join(map(show, allowed))}"
                )
        sub = section(fields[key].annotation)
        if sub is None:
            continue
        if value is None:
            if not _accepts(fields[key].annotation, type(None)):
                raise ConfigError(f"{source}: {dotted} is null; write its keys, or leave it out for the defaults")
            continue
        if is_list(fields[key].annotation):
            if not isinstance(value, (list, tuple)):
                raise ConfigError(f"{source}: {dotted} must be a list of mappings, not {show(value)}")
            for i, item in enumerate(value):
                check(sub, item, f"{dotted}[{i}]", source)
        else:
            check(sub, value, dotted, source)


def _choices(annotation: Any) -> tuple[Any, ...] | None:
    return get_args(annotation) if get_origin(annotation) is Literal else None


def is_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple


def _nearest(key: str, where: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, list(fields), n=1)
    prefix = f"{where}." if where else ""
    if close:
        return f"; did you mean {prefix + close[0]!r}?"
    return f"; known keys here: {', '.join(fields)}"


def show(value: Any) -> str:
    """A value in a sentence."""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def sentence(e: ValidationError, label: str) -> str:
    """pydantic's first complaint as one sentence."""
    err = e.errors()[0]
    key = ".".join(map(str, err["loc"]))
    if err["type"] == "missing":
        return f"{label}: key {key!r} is required"
    return f"{label}: key {key!r} is {show(err['input'])}, but {err['msg'][0].lower() + err['msg'][1:]}"


# ---- overrides and origins ----
def plain(data: Any) -> Any:
    """Snakemake hands nested overrides over as its own dict and list types."""
    if isinstance(data, Mapping):
        return {str(k): plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(v) for v in data]
    return data


def typed(annotation: Any, value: Any) -> Any:
    """An override's texts read as YAML where the key takes none: Snakemake leaves nested scalars as text."""
    sub = section(annotation)
    if sub is not None and isinstance(value, Mapping):
        fields = sub.model_fields
        return {k: typed(fields[k].annotation, v) if k in fields else v for k, v in value.items()}
    if isinstance(value, list):
        return [typed(annotation, v) for v in value]
    if not isinstance(value, str):
        return value
    read = _scalar(value)
    if _accepts_text(annotation):
        return None if read is None and _accepts(annotation, type(None)) else value
    return read


def _scalar(text: str) -> Any:
    try:
        read = yaml.load(text, _Loader)
    except (yaml.YAMLError, ConfigError, ValueError, RecursionError):
        return text
    return text if isinstance(read, (dict, list)) else read


def _accepts(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) is Literal:
        return any(isinstance(a, kind) for a in get_args(annotation))
    return annotation is kind or any(_accepts(a, kind) for a in get_args(annotation))


def _accepts_text(annotation: Any) -> bool:
    return _accepts(annotation, str)


def merge(base: Any, over: Any) -> Any:
    """`over` laid over `base`, mapping by mapping."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {**base, **{k: merge(base[k], v) if k in base else v for k, v in over.items()}}
    return over


def marked(data: Any, mark: str) -> Any:
    """The shape of `data` with every leaf replaced by `mark`."""
    if isinstance(data, Mapping):
        return {k: marked(v, mark) for k, v in data.items()}
    if isinstance(data, list) and data and isinstance(data[0], Mapping):
        return [marked(v, mark) for v in data]
    return mark


def origins(model: BaseModel, given: Any, marks: Any, where: str = "") -> dict[str, str]:
    """Origin of every value by dotted key: `default`, or the mark of the file or option that set it."""
    out: dict[str, str] = {}
    for key in type(model).model_fields:
        dotted = f"{where}.{key}" if where else key
        value = getattr(model, key)
        here = given.get(key, PydanticUndefined) if isinstance(given, Mapping) else PydanticUndefined
        mark = marks.get(key, {}) if isinstance(marks, Mapping) else marks
        if isinstance(value, BaseModel):
            out |= origins(value, here, mark, dotted)
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            for i, item in enumerate(value):
                sub = here[i] if isinstance(here, (list, tuple)) else {}
                out |= origins(item, sub, mark[i] if isinstance(mark, list) else mark, f"{dotted}[{i}]")
        elif isinstance(value, dict) and value:
            given_marks = mark if isinstance(mark, Mapping) else dict.fromkeys(value, mark)
            out |= {f"{dotted}.{k}": str(given_marks[k]) for k in value}
        else:
            out[dotted] = "default" if here is PydanticUndefined else str(mark)
    return out
