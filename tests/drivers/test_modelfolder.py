"""What a model's folder says: how long its texts may be, what it is for, how its images and its pooling are read."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from appliance.core.problems import Kind, Problem
from appliance.drivers.modelfolder import read_card
from testing.engines import FAMILIES, IMAGES

POSITIONS = 64  # of bert-cls
LABELS = {"id2label": {"0": "no", "1": "yes"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of bert-cls, to be changed."""
    shutil.copytree(FAMILIES / "bert-cls", copy := tmp_path / "model")
    return copy


def change(file: Path, **fields: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **fields}))


def refused(folder: Path, words: str, pooling: str | None = None) -> None:
    with pytest.raises(Problem, match=words) as caught:
        read_card(folder, pooling)
    assert (caught.value.kind, caught.value.code) == (Kind.INVALID, "UNSUPPORTED_MODEL")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", ["config_sentence_transformers.json", "sentence_bert_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(folder: Path, name: str) -> None:
    """A thread of control waited for ever for somebody to write into it."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(Problem, match=f"{name} cannot be read: it is no regular file"):
        read_card(folder)


# -- how long a text may be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "tokenizer", "expected"),
    [
        (None, 32, POSITIONS),  # no file of sentence-transformers: TEI takes all positions
        ({"do_lower_case": False}, 32, 32),  # as 6.0 writes it
        ({"max_seq_length": None}, 32, 32),
        ({"max_seq_length": 16}, 32, 16),
        ({"max_seq_length": 48}, 32, 48),
        ({"max_seq_length": 10**9}, 32, POSITIONS),
        ({"do_lower_case": False}, 10**30, POSITIONS),  # transformers' word for none
        ({"do_lower_case": False}, 1e30, POSITIONS),
        ({"do_lower_case": False}, None, POSITIONS),
        ({"do_lower_case": False}, -1, POSITIONS),
        ({"do_lower_case": False}, "many", POSITIONS),
    ],
)
def test_a_limit_that_the_library_does_not_say_is_that_of_the_tokenizer(
    folder: Path, own: dict[str, Any] | None, tokenizer: Any, expected: int
) -> None:
    """Texts were embedded to the end of the positions, where the library cuts them before."""
    if own is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(own))
    change(folder / "tokenizer_config.json", model_max_length=tokenizer)
    assert read_card(folder).max_tokens == expected


def test_without_a_configuration_of_the_tokenizer_the_positions_count(folder: Path) -> None:
    change(folder / "sentence_bert_config.json", do_lower_case=False)
    (folder / "tokenizer_config.json").unlink()
    assert read_card(folder).max_tokens == POSITIONS


# -- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architectures", "task"),
    [
        (["NewModel", "NewForTokenClassification"], "embedding"),  # as gte-multilingual-base has it
        (["NewForTokenClassification", "NewModel"], "embedding"),
        (["BertForTokenClassification", "BertForSequenceClassification"], "classifier"),
    ],
)
def test_labels_of_tokens_beside_something_else_are_passed_over(
    folder: Path, architectures: list[str], task: str
) -> None:
    """gte-multilingual-base was taken for a classifier of whole texts."""
    change(folder / "config.json", architectures=architectures, **LABELS)
    assert read_card(folder).task == task


def test_a_model_that_labels_tokens_alone_is_refused_by_its_name(folder: Path) -> None:
    """It was served as a classifier of whole texts, with a head that is none."""
    change(folder / "config.json", architectures=["BertForTokenClassification"], **LABELS)
    for pooling in (None, "cls", "splade"):
        refused(folder, "BertForTokenClassification has labels for tokens", pooling)


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_how_images_are_read_may_stand_with_the_rest_of_the_processor(tmp_path: Path, name: str) -> None:
    """transformers 5 writes no preprocessor_config.json; other sizes and means were taken then."""
    shutil.copytree(IMAGES / name, folder := tmp_path / "model")
    own = folder / "preprocessor_config.json"
    changed = {**json.loads(own.read_text()), "image_mean": [0.25, 0.5, 0.75], "image_std": [0.5, 0.25, 0.125]}
    own.write_text(json.dumps(changed))
    expected = read_card(folder).images
    own.unlink()
    with pytest.raises(Problem, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        read_card(folder)
    change(folder / "processor_config.json", processor_class="X")
    with pytest.raises(Problem, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        read_card(folder)
    change(folder / "processor_config.json", image_processor=changed)
    assert expected is not None
    assert read_card(folder).images == expected


# -- modules ----------------------------------------------------------------------------------------------------------


def test_the_pooling_is_read_where_its_module_lies(folder: Path) -> None:
    """1_Pooling was read whatever modules.json says, and bert without it pooled by the first token."""
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "2_Mean"
    (folder / "modules.json").write_text(json.dumps(modules))
    change(folder / "2_Mean/config.json", pooling_mode_mean_tokens=True)
    assert read_card(folder).pooling == "mean"
    change(folder / "2_Mean/config.json", pooling_mode_cls_token=True)
    with pytest.raises(Problem, match=r"2_Mean/config\.json asks for a pooling that is not supported"):
        read_card(folder)


def test_a_pooling_that_is_missing_is_named_by_its_folder(tmp_path: Path) -> None:
    shutil.copytree(FAMILIES / "mpnet-mean", folder := tmp_path / "model")
    kinds = {"": "Transformer", "2_Pool": "Pooling"}
    entries = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(entries))
    with pytest.raises(Problem, match=r"model has no 2_Pool/config\.json: choose one"):
        read_card(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pooling_strategy": "sum"}, 'pooling_strategy "sum"; only max is computed'),
        ({"activation_function": "log1p_relu"}, 'activation_function "log1p_relu"; only relu is computed'),
        ({"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": None}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_another_pooling_of_splade_is_refused(tmp_path: Path, fields: dict[str, Any] | None, words: str) -> None:
    """It was computed with the usual one, to other weights."""
    shutil.copytree(FAMILIES / "bert-splade", folder := tmp_path / "model")
    kinds = ("sparse_encoder.models.MLMTransformer", "sparse_encoder.models.SpladePooling")
    paths = ("", "1_SpladePooling")
    entries = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in zip(paths, kinds, strict=True)]
    (folder / "modules.json").write_text(json.dumps(entries))
    if fields is not None:
        change(folder / "1_SpladePooling/config.json", **fields)
    if words:
        refused(folder, words, "splade")
    else:
        assert read_card(folder, "splade").task == "sparse"
