"""`build`: names, import paths, options and data facts, and the sentence that each mistake gets."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.models import MODELS, build
from paceline.spec import ModelSpec

SCALED_UP = [f"efficientnet-b{number}" for number in range(1, 8)]
"""Built by the same function as efficientnet-b0, and slow."""

USER_MODULE = """
from torch import nn

class Net(nn.Linear):
    def __init__(self, num_classes, width: "Undefined" = 3, *, depth=()):
        super().__init__(width, num_classes)
        self.depth = depth

def anything(**options):
    model = nn.Identity()
    model.options = options
    return model

def nothing():
    return None

def broken():
    raise RuntimeError("the user's own bug")

ready = nn.Identity()
number = 3

class Family:
    @staticmethod
    def small(num_classes=2):
        return nn.Linear(1, num_classes)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_nets.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "user_nets", raising=False)
    return "user_nets"


def refusal(name: str, options: dict[str, Any] | None = None, **data_facts: Any) -> str:
    with pytest.raises(ModelError) as caught:
        build(ModelSpec(name, options or {}), **data_facts)
    message = str(caught.value)
    assert "\n" not in message
    return message


def out_features(model: nn.Module) -> int:
    return [module.out_features for module in model.modules() if isinstance(module, nn.Linear)][-1]


IMAGE_MODELS = [name for name in MODELS if name != "gpt" and name not in SCALED_UP]
THREE_CHANNELS = {"cifarnet"}
"""Models of colour images alone, which refuse others (test_models.py)."""


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_every_image_model_takes_the_facts_of_its_data(name: str) -> None:
    with torch.device("meta"):
        channels = 3 if name in THREE_CHANNELS else 2
        model = build(ModelSpec(name), num_classes=7, in_channels=channels, image_size=64, vocab_size=11, context=5)
        assert model(torch.empty(3, channels, 64, 64)).shape == (3, 7)


def test_a_text_model_takes_the_facts_of_its_data() -> None:
    model = build(ModelSpec("gpt"), vocab_size=11, context=5, num_classes=7, image_size=64)
    assert model(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 11)


def test_options_win_over_facts() -> None:
    assert out_features(build(ModelSpec("lenet", {"num_classes": 3}), num_classes=10)) == 3


def test_an_unknown_fact_leaves_the_default() -> None:
    assert out_features(build(ModelSpec("lenet"), num_classes=None)) == 10


def test_a_whole_number_serves_as_a_probability() -> None:
    model = build(ModelSpec("mlp", {"dropout": 0}))
    assert [module.p for module in model.modules() if isinstance(module, nn.Dropout)] == [0.0]


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("resnet81", "resnet18"),
        ("ResNet18", "resnet18"),
        ("efficientnet_b3", "efficientnet-b3"),
        ("gtp", "gpt"),
    ],
)
def test_a_wrong_name_gets_the_nearest_and_the_list(wrong: str, nearest: str) -> None:
    message = refusal(wrong)
    assert f"There is no model '{wrong}': did you mean '{nearest}'?" in message
    assert all(name in message for name in MODELS)


def test_a_name_far_from_all_gets_the_list_alone() -> None:
    message = refusal("zzzz")
    assert "did you mean" not in message
    assert all(name in message for name in MODELS)


def test_a_wrong_option_gets_the_nearest_and_the_list() -> None:
    message = refusal("mlp", {"hiden": 3})
    assert "'mlp'" in message
    assert "'model.options.hiden'" in message
    assert "'hidden'" in message
    for allowed in ("num_classes", "in_features", "in_channels", "image_size", "hidden", "dropout"):
        assert allowed in message


def test_the_variant_of_an_efficientnet_is_no_option() -> None:
    assert "'model.options.variant'" in refusal("efficientnet-b0", {"variant": "efficientnet-b1"})


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("gpt", {"width": "wide"}, "model.options.width = 'wide' should be a whole number"),
        ("gpt", {"num_layers": 0}, "model.options.num_layers = 0 should be at least 1"),
        ("gpt", {"num_layers": True}, "model.options.num_layers = True should be a whole number"),
        (
            "gpt",
            {"width": 130},
            "model.options.width = 130 should be a multiple of model.options.num_heads = 4",
        ),
        ("mlp", {"in_features": 0}, "model.options.in_features = 0 should be at least 1"),
        ("mlp", {"dropout": 1.5}, "model.options.dropout = 1.5 should be at most 1"),
        ("efficientnet-b0", {"dropout": -0.1}, "model.options.dropout = -0.1 should be at least 0"),
        ("efficientnet-b0", {"stem_stride": 3}, "model.options.stem_stride = 3 is not possible"),
        ("resnet18", {"stem": "cifra"}, "did you mean 'cifar'?"),
        ("resnet18", {"zero_init_residual": 1}, "should be true or false"),
    ],
)
def test_an_impossible_value_gets_the_option_and_what_is_allowed(name: str, options: dict[str, Any], said: str) -> None:
    message = refusal(name, options)
    assert said in message
    assert f"'{name}'" in message


def test_an_import_path_gets_options_and_the_facts_it_asks_for(user_module: str) -> None:
    model = build(ModelSpec("user_nets:Net", {"depth": [1, 2]}), num_classes=4, image_size=28)
    assert isinstance(model, nn.Linear)
    assert (model.in_features, model.out_features) == (3, 4)
    assert str(model.depth) == "[1, 2]"


def test_an_import_path_may_be_dotted_behind_the_colon(user_module: str) -> None:
    assert out_features(build(ModelSpec("user_nets:Family.small"), num_classes=9)) == 9


def test_any_option_reaches_a_constructor_that_takes_any_but_no_fact_does(user_module: str) -> None:
    model = build(ModelSpec("user_nets:anything", {"a-b": 1, "c": "x"}), num_classes=4)
    assert model.options == {"a-b": 1, "c": "x"}


def test_a_wrong_option_of_an_import_path(user_module: str) -> None:
    message = refusal("user_nets:Net", {"widht": 3, "num_classes": 2})
    assert "'model.options.widht': did you mean 'width'?" in message
    assert "depth, num_classes, width" in message


def test_a_missing_option_of_an_import_path(user_module: str) -> None:
    assert "'model.options.num_classes' is missing" in refusal("user_nets:Net")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("no_such_package.nets:build", "there is no module 'no_such_package'"),
        ("user_nets.deeper:build", "there is no module 'user_nets.deeper'"),
        ("user_nets:missing", "has no 'missing'"),
        ("user_nets:Family.large", "has no 'Family.large'"),
        ("user_nets:number", "not a int"),
        ("user_nets:ready", "is of type Identity"),
        ("user_nets:nothing", "returned something of type NoneType"),
        ("user_nets:", "is not an import path"),
        (":build", "is not an import path"),
        ("user nets:build", "is not an import path"),
        ("../user_nets.py:Net", "is not an import path"),
    ],
)
def test_an_import_path_that_leads_to_no_model(user_module: str, path: str, said: str) -> None:
    message = refusal(path)
    assert said in message
    assert path in message


def test_a_bug_in_the_users_module_keeps_its_traceback(user_module: str, tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("import no_such_dependency\n")
    sys.modules.pop("lacking", None)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        build(ModelSpec("lacking:build"))


def test_what_the_users_own_build_raises_passes_through(user_module: str) -> None:
    with pytest.raises(RuntimeError, match="the user's own bug") as caught:
        build(ModelSpec("user_nets:broken"))
    assert caught.traceback[-1].name == "broken"


def test_weights_come_from_the_global_generator_alone() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build(ModelSpec("resnet20")).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["stem.0.weight"], other["stem.0.weight"])
