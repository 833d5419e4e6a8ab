"""Bases of the models of what people and programs write, over HTTP or in YAML."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    model_validator,
)

from gpumond.facts import units
from gpumond.facts.units import require_encodable


class Encodable(BaseModel):
    """Base of the models of request bodies and of the configuration. All text in the input, keys and unknown keys
    included, must be encodable in UTF-8, so that each endpoint can write what is stored.
    """

    @model_validator(mode="before")
    @classmethod
    def _encodable(cls, value: Any) -> Any:
        require_encodable(value)
        return value


Seconds = Annotated[float, BeforeValidator(units.seconds)]


class Strict(Encodable):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)
