"""Conversations as token ids: a chat template's marks around what was said, and no id encoded a second time."""

from pathlib import Path
from typing import Any

import pytest

from rollstock import Completion, Environment, GenerationResult, NoOptions, Sampling, Task, UserError
from rollstock.episodes import Player
from rollstock.tokens import character_tokenizer, decode, encode_prompt, encode_reply, end_ids

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{{ eos_token }}|{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz@[]|?! ")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def smollm2() -> Any:
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip(f"the demo's model is not there: {SMOLLM2} (examples/prepare_smollm2.py makes it)")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)


def shown(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_messages_go_through_the_template_up_to_the_reply() -> None:
    tokenizer = chat_tokenizer()
    ids = encode_prompt(tokenizer, [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}])
    assert shown(tokenizer, ids) == "[s]be kind<end>|[u]hi<end>|[a]"
    assert ids.count(tokenizer.eos_token_id) == 2  # one id, not five characters


def test_token_ids_stay_as_they_are() -> None:
    assert encode_prompt(chat_tokenizer(), [3, 1, 2]) == [3, 1, 2]


def test_messages_without_a_template_are_refused_with_the_ways_out() -> None:
    with pytest.raises(UserError, match=r"no chat template; choose a plain-text prompt .*, or a chat model"):
        encode_prompt(character_tokenizer("hi"), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("ended", "expected"), [(True, "|[u]why?<end>|[a]"), (False, "<end>|[u]why?<end>|[a]")], ids=["ended", "cut"]
)
def test_a_reply_closes_the_policys_turn_only_where_it_did_not_do_so_itself(ended: bool, expected: str) -> None:
    tokenizer = chat_tokenizer()
    assert shown(tokenizer, encode_reply(tokenizer, "why?", chat=True, ended=ended)) == expected


def test_a_conversation_that_grows_turn_by_turn_is_the_whole_one_as_the_template_writes_it() -> None:
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "hi"}]
    ids = encode_prompt(tokenizer, messages)
    for said, reply in (("hello", "how are you?"), ("fine", "good!")):
        ids += tokenizer(said)["input_ids"] + [tokenizer.eos_token_id]
        ids += encode_reply(tokenizer, reply, chat=True, ended=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
    assert ids == encode_prompt(tokenizer, messages)


def test_a_reply_in_plain_text_has_no_marks() -> None:
    tokenizer = chat_tokenizer()
    assert shown(tokenizer, encode_reply(tokenizer, "why?", chat=False, ended=True)) == "why?"


def test_a_template_that_drops_what_the_policy_said_is_refused() -> None:
    deaf = "{% for m in messages %}{% if m.role == 'user' %}[u]{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(UserError, match="chat template does not repeat what the policy said"):
        encode_reply(chat_tokenizer(deaf), "why?", chat=True, ended=True)


def test_text_is_decoded_without_marks() -> None:
    tokenizer = chat_tokenizer()
    assert decode(tokenizer, [*tokenizer("hi")["input_ids"], tokenizer.eos_token_id]) == "hi"


def test_a_tokenizer_without_an_end_has_no_end_ids() -> None:
    tokenizer = chat_tokenizer()
    assert end_ids(tokenizer) == (tokenizer.eos_token_id,)
    tokenizer.eos_token = None
    assert end_ids(tokenizer) == ()


def test_a_real_template_continues_as_it_would_have_begun(smollm2: Any) -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    ids = encode_prompt(smollm2, messages) + smollm2("4")["input_ids"] + [smollm2.eos_token_id]
    ids += encode_reply(smollm2, "Sure?", chat=True, ended=True)
    messages += [{"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    assert ids == encode_prompt(smollm2, messages)


class Asks(Environment[NoOptions]):
    """Asks once more."""

    def num_tasks(self, split: str) -> None:
        return None

    def task(self, split: str, index: int) -> Task:
        return Task(id=str(index), prompt="say hello: ")

    def respond(self, task: Task, turns: Any, state: dict[str, Any]) -> str | None:
        return None if len(turns) > 1 else " again: "


def test_ids_that_would_be_encoded_otherwise_are_kept(cases: dict[str, Any], smollm2: Any) -> None:
    case = cases["retokenise"]
    assert smollm2(case["text"])["input_ids"] == case["re_encoded"]
    asked: list[tuple[int, ...]] = []

    def generate(requests: Any, sampling: Sampling) -> GenerationResult:
        asked.extend(request.prompt for request in requests)
        done = Completion(tokens=list(case["ids"]), logprobs=[-1.0, -1.0], finish_reason="stop", versions=[1, 1])
        return GenerationResult([done for _ in requests])

    player = Player(generate, Asks(), smollm2, max_prompt_tokens=None, overlong="error")
    task = Asks().task("train", 0)
    (episode,), _ = player.play([task], samples=1, sampling=Sampling(max_new_tokens=32), seed_of=lambda g, k: 0)
    assert [turn["content"] for turn in episode.turns if turn["role"] == "assistant"] == [case["text"]] * 2
    reply = encode_reply(smollm2, " again: ", chat=False, ended=False)
    assert episode.tokens == [*case["ids"], *reply, *case["ids"]]
    assert asked[1] == (*asked[0], *case["ids"], *reply)
