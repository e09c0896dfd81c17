"""Which instance a command means that names none."""

from typing import Any

import pytest

from appliance.cli.instances import named_or_only
from appliance.core.problems import Kind, Problem


class Control:
    def __init__(self, *names: str, refusal: Problem | None = None) -> None:
        self.names, self.refusal = names, refusal

    def instances(self) -> list[dict[str, Any]]:
        if self.refusal:
            raise self.refusal
        return [{"name": name} for name in self.names]


def meant(control: Any, name: str | None = None) -> str:
    return named_or_only(control, name)


def test_the_one_that_is_named_or_the_only_one() -> None:
    assert meant(Control("a", "b"), "b") == "b"
    assert meant(Control("a")) == "a"
    with pytest.raises(Problem, match="Choose one with --instance: a, b"):
        meant(Control("a", "b"))


def test_a_key_that_may_not_list_them_is_told_what_to_do() -> None:
    with pytest.raises(Problem, match="name one with --instance") as refused:
        meant(Control(refusal=Problem(Kind.FORBIDDEN, "FORBIDDEN", "has the role inference")))
    assert refused.value.kind is Kind.FORBIDDEN
    with pytest.raises(Problem, match="is the appliance up"):
        meant(Control(refusal=Problem(Kind.UNAVAILABLE, "UNREACHABLE", "is the appliance up?")))
