"""What the objects of all requests share: rules, and fields that several of them have."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=1)]
MOST_FIELDS = 64
"""Of an object. As ``fail_fast`` for lists, it bounds the number of errors: reporting a million of them takes minutes."""


def one_of(rule: str, remedy: str = "") -> WrapValidator:
    """One message for a field with several forms, in place of one for each form."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("one_of", "Input should be {rule}", {"rule": rule, "remedy": remedy}) from None

    return WrapValidator(check)


def tagged(rule: str, remedy: str = "") -> WrapValidator:
    """One message for a value that is none of several forms, as a ``type`` tells them. Others are about what it consists of."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if any(one["loc"] for one in error.errors()):
                raise
            raise PydanticCustomError("one_of", "Input should be {rule}", {"rule": rule, "remedy": remedy}) from None

    return WrapValidator(check)


def packed(tokens: Sequence[int]) -> Sequence[int]:
    """Tokens as one object: a list of a million is read from a worker, or freed, in one go and with Python's lock held."""
    try:
        return array("i", tokens)
    except OverflowError:  # no tokenizer has them: they are refused where tokens are checked
        return tokens


UNREAD = AfterValidator(lambda _: None)
"""Forgets the value of a field that nothing reads, when it has been checked."""


class Body(BaseModel):
    """An object in a request."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, data: Any) -> Any:
        """Fields that are not null. Raises ValueError if there are too many of them."""
        if not isinstance(data, dict):
            return data
        if len(data) > MOST_FIELDS:
            raise ValueError(f"an object must have at most {MOST_FIELDS} fields, got {len(data)}")
        return {name: value for name, value in data.items() if value is not None}


class QueuedBody(Body):
    """A request that waits for the engine. These fields are neither OpenAI's nor Anthropic's."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] = ""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
