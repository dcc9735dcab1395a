"""The `model` reward: what it reads, what it says, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch

from rollstock import ConfigError, Sample, Task
from rollstock.hardware.cpu import CPU
from rollstock.plugins.environments.arithmetic import Arithmetic
from rollstock.plugins.rewards.model import ModelReward, ModelRewardConfig
from rollstock.testing.models import byte_tokenizer, save_classifier

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}|{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    save_classifier(path, max_tokens=96)
    return path


def make(path, **options) -> ModelReward:
    reward = ModelReward(ModelRewardConfig(path=str(path), **options))
    reward.device = CPU()
    reward.device.activate()
    reward.setup(Arithmetic())
    return reward


def sample(response: str, *, prompt="2+3=", finish: str = "stop", turns=()) -> Sample:
    return Sample(task=Task(id="t", prompt=prompt), response=response, finish_reason=finish, turns=list(turns))


def plain_score(path: Path, text: str, *, ended: bool = True) -> float:
    """What transformers says of one text alone."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    ids = byte_tokenizer()(text)["input_ids"] + ([0] if ended else [])
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([ids])).logits)


def test_scores_are_those_of_plain_transformers_whatever_stands_beside(classifier):
    samples = [sample("5"), sample("no idea at all"), sample("55", finish="length"), sample("")]
    expected = [
        plain_score(classifier, "2+3=5"),
        plain_score(classifier, "2+3=no idea at all"),
        plain_score(classifier, "2+3=55", ended=False),
        plain_score(classifier, "2+3="),
    ]
    assert make(classifier).score_batch(samples) == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_passes_of_any_size_give_the_same_scores_in_order(classifier, budget):
    samples = [sample("x" * n) for n in (5, 1, 30, 2, 7)]
    alone = [make(classifier).score(each) for each in samples]
    assert make(classifier, tokens_per_pass=budget).score_batch(samples) == pytest.approx(alone, abs=1e-5)


def test_chat_messages_go_through_the_chat_template(tmp_path):
    save_classifier(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path)
    message = {"role": "user", "content": "hello"}
    one = make(tmp_path).score(sample("hi", prompt=[message]))
    # the end mark is one token, which the text "<end>" stands for
    assert one == pytest.approx(plain_score(tmp_path, "<user>hello|<assistant>hi"), abs=1e-5)
    turns = [
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "yes"},
    ]
    more = make(tmp_path).score(sample("yes", prompt=[message], turns=turns))
    text = "<user>hello|<assistant>hi<end>|<user>sure?|<assistant>yes"
    assert more == pytest.approx(plain_score(tmp_path, text), abs=1e-5)


def test_a_sample_that_is_too_long_abstains_or_is_cut_from_the_left(classifier):
    long = sample("x" * 200)
    assert make(classifier).score_batch([long, sample("5")])[0] is None
    assert make(classifier).score_batch([long, sample("5")])[1] is not None
    cut = make(classifier, max_tokens=9, overlong="truncate_left").score(long)
    assert cut == pytest.approx(plain_score(classifier, "x" * 8), abs=1e-5)


def test_scores_are_normalised(classifier):
    plain = make(classifier).score(sample("5"))
    assert make(classifier, mean=2.0, std=4.0).score(sample("5")) == pytest.approx((plain - 2) / 4)


def test_lower_precision_is_near(classifier):
    reward = make(classifier, dtype="bfloat16")
    assert {p.dtype for p in reward._model.parameters()} == {torch.bfloat16}
    assert reward.score(sample("5")) == pytest.approx(make(classifier).score(sample("5")), abs=0.1)


def test_a_classifier_with_a_head_of_its_own_is_asked_as_a_whole(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **sizes)).eval()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with torch.no_grad():
        expected = float(model(input_ids=torch.tensor([byte_tokenizer()("2+3=5")["input_ids"] + [0]])).logits)
    scores = make(tmp_path).score_batch([sample("5"), sample("a longer one")])
    assert scores[0] == pytest.approx(expected, abs=1e-5)


def refuse(path: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        make(path)


def test_what_is_no_reward_model_is_refused_with_what_to_do(tmp_path, classifier):
    refuse(tmp_path / "nowhere", "nowhere does not exist; give the directory of a reward model")
    refuse(classifier / "config.json", "is a file, not a directory")
    refuse(tmp_path, "has no config.json")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    refuse(run, r"is a run, not a model; export its reward model with `rollstock export .*/run --to DIRECTORY`")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    refuse(tmp_path, "holds LlamaForCausalLM, not a sequence classifier; train one with `algorithm: reward_model`")
    save_classifier(tmp_path / "three", num_labels=3)
    refuse(tmp_path / "three", "tells 3 labels apart; a reward model has one")


def test_a_directory_without_tokenizer_or_weights_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_classifier(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    refuse(tmp_path, "lacks weights of the model, first 'score.weight'")
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    refuse(
        tmp_path,
        r"rewards\.model\.path: .* has no tokenizer \(no tokenizer\.json, for one\); give a directory that has$",
    )
