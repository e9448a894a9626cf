"""What a group of settings is: strict, frozen, and described field by field."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

LARGEST_COUNT = 2**53  # the largest range in which every whole number is also exact as a float
RATIO_ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is not exactly 1 in binary


def setting(default: Any, description: str, *, auto: bool = False, **limits: Any) -> Any:
    """Describe a field; what is `auto`, unless the user sets it, follows from the data.

    `config/auto.py` resolves it.
    """
    marks = {"json_schema_extra": {"auto": True}} if auto else {}
    return Field(default, description=description, **{**marks, **limits})


def count(default: int | None, description: str, minimum: int = 1, *, auto: bool = False) -> Any:
    """Describe a field that holds a whole number of at least `minimum`."""
    return setting(default, description, auto=auto, ge=minimum, le=LARGEST_COUNT)


def share(default: float, description: str, *, auto: bool = False) -> Any:
    """Describe a field that holds a share: a number from 0 to 1."""
    return setting(default, description, auto=auto, ge=0, le=1)


def rate(default: float, description: str, *, auto: bool = False) -> Any:
    """Describe a field that holds a share of what is never all: a number from 0 to below 1."""
    return setting(default, description, auto=auto, ge=0, lt=1)


def weight(default: float, description: str, *, auto: bool = False) -> Any:
    """Describe a field that holds a number of at least 0."""
    return setting(default, description, auto=auto, ge=0)


def is_auto(field: FieldInfo) -> bool:
    """Say whether a field that is not set follows from the data."""
    return isinstance(field.json_schema_extra, dict) and "auto" in field.json_schema_extra


def text(default: str | None, description: str, **extra: Any) -> Any:
    """Describe a field that holds a text that is not empty."""
    extra = {"pattern": r"^[^\x00]+$", **extra}  # no file and no key has a NUL in its name
    return setting(default, description, min_length=1, **extra)


class Section(BaseModel):
    """A group of settings: unknown keys, loose types, infinities and later changes are refused."""

    # An alias is a field's documented name, where the code has a plainer one.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True
    )
