"""Modules of sentence-transformers: those in an order that is not computed here are refused, not computed otherwise."""

import pytest

from appliance.core import sentence_modules
from appliance.core.problems import Kind, Problem

OLD, NEW = "sentence_transformers.models.", "sentence_transformers.base.modules.x."
PYLATE = "pylate.models.Dense."


def modules(*kinds: str) -> list[dict[str, str]]:
    return [{"path": f"{at}_{kind}" if at else "", "type": kind} for at, kind in enumerate(kinds)]


@pytest.mark.parametrize("prefix", [OLD, NEW])
@pytest.mark.parametrize(
    "kinds",
    [
        (),
        ("Transformer",),
        ("Transformer", "Pooling"),
        ("Transformer", "Pooling", "Normalize"),
        ("Transformer", "Pooling", "Dense", "Normalize"),
        ("Transformer", "Pooling", "Dropout", "Dense", "Dense", "Normalize"),
        ("StaticEmbedding", "Normalize"),
        ("CLIPModel",),
        ("MLMTransformer", "SpladePooling"),
        ("Transformer", "LogitScore"),
        ("Transformer", "Dense", "MultiVectorMask", "Normalize"),
        ("Transformer", "Normalize", "Dense", "MultiVectorMask"),  # of token vectors the order is another one
    ],
)
def test_the_usual_orders_are_taken(prefix: str, kinds: tuple[str, ...]) -> None:
    sentence_modules.refuse_unknown("modules.json", modules(*(prefix + kind for kind in kinds)))


def test_the_modules_of_pylate_are_its_own() -> None:
    for kinds in ((f"{OLD}Transformer", f"{PYLATE}Dense"), (f"{OLD}Transformer", f"{OLD}Dense", f"{PYLATE}Pooling")):
        sentence_modules.refuse_unknown("modules.json", modules(*kinds))


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Dense", "Pooling"),
        ("Transformer", "Dense", "Pooling", "Normalize"),
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "Normalize", "Pooling"),
    ],
)
def test_another_order_is_refused(kinds: tuple[str, ...]) -> None:
    """A layer before the pooling, or behind the scaling, was computed between the two."""
    with pytest.raises(Problem, match="in an order that is not computed here: Transformer, ") as refused:
        sentence_modules.refuse_unknown("m/modules.json", modules(*(OLD + kind for kind in kinds)))
    assert (refused.value.kind, refused.value.code) == (Kind.INVALID, "UNSUPPORTED_MODEL")
    assert refused.value.message.startswith("m/modules.json ")


def test_an_unknown_module_is_named() -> None:
    with pytest.raises(Problem, match=r'modules\.json has a module "sentence_transformers\.models\.LayerNorm"'):
        sentence_modules.refuse_unknown("modules.json", modules(f"{OLD}Transformer", f"{OLD}LayerNorm"))


@pytest.mark.parametrize(
    ("listed", "folder"),
    [
        ([], "1_Pooling"),
        ([{"path": "", "type": f"{OLD}Transformer"}], "1_Pooling"),
        ([{"path": "", "type": f"{OLD}Transformer"}, {"path": "2_Pooling", "type": f"{NEW}Pooling"}], "2_Pooling"),
        ([{"path": "3_X", "type": f"{NEW}SpladePooling"}], "1_Pooling"),
        ([{"type": f"{OLD}Pooling"}], "1_Pooling"),
    ],
)
def test_the_folder_of_the_pooling_is_that_of_its_module(listed: list[dict[str, str]], folder: str) -> None:
    assert sentence_modules.pooling_folder(listed) == folder
