"""How a model is named: the strict rule of what is registered, and the loose one of what an instance may ask for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.core import model_names
from appliance.core.fields import Check
from appliance.core.problems import Problem
from testing.specs import LAW

# (id, whether it may be registered, whether an instance may ask for it)
IDS: list[tuple[str, bool, bool]] = [
    ("a", True, True),
    ("BAAI/bge-small-en-v1.5", True, True),
    ("/models/one", True, True),
    ("/", False, True),
    ("/a//b", False, True),
    ("/a/./b", False, True),
    ("./a", False, True),
    ("模型", False, True),
    ("my model", False, True),
    ("a--b", False, True),
    ("a..b", False, True),
    ("a.git", False, True),
    ("a/b/c", False, True),
    ("-x", False, False),
    (" a", False, False),
    ("a ", False, False),
    ("a\nb", False, False),
    ("", False, False),
    ("a" * 97, False, True),
    ("/" + "a" * 511, True, True),
    ("/" + "a" * 512, True, False),
    ("/" + "a" * 1024, False, False),
]
REVISIONS: list[tuple[str, bool, bool]] = [
    ("main", True, True),
    ("refs/pr/1", True, True),
    ("v1.0", True, True),
    ("1.0+onnx", True, True),
    ("_draft/@me,50%=half#2", True, True),
    ("main@{1}", False, True),
    ("a.", False, True),
    ("a/", False, True),
    ("a//b", False, True),
    ("a/.b", False, True),
    ("HEAD~1", False, True),
    ("größe", False, True),
    ("a..b", False, True),
    ("../x", False, True),
    ("/etc", False, True),
    ("my branch", False, True),
    ("-x", False, False),
    ("a\0", False, False),
    ("", False, False),
    ("a" * 256, True, True),
    ("a" * 257, False, False),
]


def accepts(check: Check, value: object) -> bool:
    try:
        return check(value) == value
    except ValueError:
        return False


@pytest.mark.parametrize(("name", "registered", "served"), IDS)
def test_an_id(name: str, registered: bool, served: bool) -> None:
    assert (accepts(model_names.registered_id, name), accepts(model_names.served_id, name)) == (registered, served)


@pytest.mark.parametrize(("name", "registered", "served"), REVISIONS)
def test_a_revision(name: str, registered: bool, served: bool) -> None:
    checks = (model_names.registered_revision, model_names.served_revision)
    assert tuple(accepts(check, name) for check in checks) == (registered, served)


@LAW
@given(st.text("aZ9._-/@{+~", max_size=12))
def test_what_may_be_registered_leads_nowhere_else(name: str) -> None:
    if accepts(model_names.registered_revision, name):
        assert accepts(model_names.served_revision, name)
        assert not model_names.leads_out(name)
        model_names.refuse_leading_out(name)


@pytest.mark.parametrize("name", ["/etc", "..", "../x", "a/../b", "a/.."])
def test_a_new_instance_is_refused_a_revision_that_leads_out_of_the_cache(name: str) -> None:
    with pytest.raises(Problem, match=r'^Field "revision" must be a branch, tag or commit, not "'):
        model_names.refuse_leading_out(name)


def test_no_revision_leads_nowhere() -> None:
    model_names.refuse_leading_out(None)
    model_names.refuse_leading_out("a..b")
