"""Prompts that a model's chat template renders."""

import numpy as np
import pytest
import tiny_models

from hae import record, trace
from hae.prompts import PromptError, load_prompts

# Says who speaks, and writes the token that begins a text itself. z: here the answer begins.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message.role[0] }} {{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %} z{% endif %}"
)
PICTURE_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message.role[0] }}"
    "{% for item in message.content %}"
    "{% if item.type == 'image' %} <image>{% else %} {{ item.text }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %} z{% endif %}"
)
MESSAGES = [
    {"role": "user", "content": "b c"},
    {"role": "assistant", "content": "d"},
    {"role": "user", "content": "e"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    reader, processor = tiny_models.tokenizer(), tiny_models.processor()
    plain = tiny_models.save(tiny_models.llama(), reader, folder / "plain")
    reader.chat_template, processor.chat_template = TEMPLATE, PICTURE_TEMPLATE
    return {
        "plain": plain,
        "chat": tiny_models.save(tiny_models.llama(), reader, folder / "chat"),
        "pictures": tiny_models.save(tiny_models.llava(), processor, folder / "pictures"),
    }


def run(folder, model, entries, *options):
    prompts = tiny_models.write_prompts(folder, entries)
    out = folder / "out.h5"
    arguments = [str(model), "--out", str(out), "--prompts", str(prompts), *options]
    return record.main([*arguments, "--max-new-tokens", "1"]), out


def tokens_of(out):
    with trace.open_trace(out) as file:
        return [group["token"].asstr()[()].tolist() for group in file["sequences"].values()]


def refused(capsys, code):
    (line,) = capsys.readouterr().err.strip().splitlines()
    return code, line


def test_a_text_is_what_the_user_says_and_messages_are_a_dialogue(tmp_path, folders):
    code, out = run(tmp_path, folders["chat"], [{"text": "a"}, {"messages": MESSAGES}], "--chat")
    assert code == 0
    # The template's <bos>, and none that the tokenizer adds.
    assert tokens_of(out) == [
        ["<bos>", "u", "a", "z"],
        ["<bos>", "u", "b", "c", "a", "d", "u", "e", "z"],
    ]


def test_without_chat_the_text_is_taken_as_it_is(tmp_path, folders):
    _, out = run(tmp_path, folders["chat"], [{"text": "a"}])
    assert tokens_of(out) == [["<bos>", "a"]]


def test_pictures_stand_before_the_text_or_where_messages_have_them(tmp_path, folders):
    tiny_models.picture(0).save(tmp_path / "p.png")
    text, picture = {"type": "text", "text": "b"}, {"type": "image"}
    entries = [
        {"text": "a", "images": ["p.png"]},
        {"messages": [{"role": "user", "content": [text, picture]}], "images": ["p.png"]},
    ]
    code, out = run(tmp_path, folders["pictures"], entries, "--chat")
    assert code == 0
    n = tiny_models.VISUAL_TOKENS
    image = ["<image>"] * n
    assert tokens_of(out) == [
        ["<bos>", "u", *image, "a", "z"],
        ["<bos>", "u", "b", *image, "z"],
    ]
    with trace.open_trace(out) as file:
        found = file["sequences/000001/image"][()]
        assert (found == np.array([-1] * 3 + [0] * n + [-1])).all()


def test_a_model_without_a_template_is_a_usage_error(tmp_path, folders, capsys):
    code, line = refused(capsys, run(tmp_path, folders["plain"], [{"text": "a"}], "--chat")[0])
    assert code == 2 and "--chat: the model's folder holds no chat template" in line
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}


def test_a_template_that_refuses_a_prompt_names_it(tmp_path, folders, capsys):
    reader = tiny_models.tokenizer()
    reader.chat_template = "{{ raise_exception('roles must alternate') }}"
    folder = tiny_models.save(tiny_models.llama(), reader, tmp_path / "model")
    capsys.readouterr()
    code, line = refused(capsys, run(tmp_path, folder, [{"text": "a"}], "--chat")[0])
    assert code == 3
    assert "prompt 000000: the chat template refused it: roles must alternate" in line


# Of LLaVA 1.5: parts, which it selects; a string has none.
PARTS_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} {{ message.role[0] }}"
    "{% for item in message.content | selectattr('type', 'equalto', 'text') %} {{ item.text }}"
    "{% endfor %}{% endfor %} z"
)


@pytest.mark.parametrize("template", [PARTS_TEMPLATE, TEMPLATE])
def test_texts_reach_templates_of_parts_and_of_strings(tmp_path, template):
    reader = tiny_models.tokenizer()
    reader.chat_template = template
    folder = tiny_models.save(tiny_models.llama(), reader, tmp_path / "model")
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": " c"}]
    entries = [{"text": "a"}, {"messages": [{"role": "user", "content": parts}]}]
    code, out = run(tmp_path, folder, entries, "--chat")
    assert code == 0
    assert tokens_of(out) == [["<bos>", "u", "a", "z"], ["<bos>", "u", "b", "c", "z"]]


def test_a_template_that_drops_a_text_is_refused(tmp_path, capsys):
    reader = tiny_models.tokenizer()
    reader.chat_template = "{{ bos_token }} z"
    folder = tiny_models.save(tiny_models.llama(), reader, tmp_path / "model")
    capsys.readouterr()
    code, line = refused(capsys, run(tmp_path, folder, [{"text": "a"}], "--chat")[0])
    assert code == 3
    assert "prompt 000000: the chat template leaves out or changes what the messages say" in line


def test_a_picture_that_no_message_mentions_is_bad_input(tmp_path, folders, capsys):
    tiny_models.picture(0).save(tmp_path / "p.png")
    entry = {"messages": [{"role": "user", "content": []}], "images": ["p.png"]}
    code, line = refused(capsys, run(tmp_path, folders["pictures"], [entry], "--chat")[0])
    assert code == 3 and "prompt 000000" in line


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], '"messages" must be a list that is not empty'),
        ("a", '"messages" must be a list'),
        ([*MESSAGES, {"role": "user"}], "message 3 .counted from 0.: expected"),
        ([{"role": 1, "content": "a"}], "message 0"),
        ([{"role": "user", "content": 1}], "message 0"),
        ([{"role": "user", "content": [{"type": "image", "url": "p"}]}], "message 0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0"),
        ([{"role": "user", "content": ["a"]}], "message 0"),
        ([{"role": "user", "content": "\ud800"}], "half a surrogate pair"),
    ],
)
def test_messages_that_are_none_are_named_by_line(tmp_path, messages, message):
    path = tiny_models.write_prompts(tmp_path, [{"text": "a"}, {"messages": messages}])
    with pytest.raises(PromptError, match=rf"prompts.jsonl:2: .*{message}"):
        load_prompts(path, chat=True)


@pytest.mark.parametrize("entry", [{}, {"text": "a", "messages": MESSAGES}])
def test_a_line_has_a_text_or_messages(tmp_path, entry):
    path = tiny_models.write_prompts(tmp_path, [entry])
    with pytest.raises(PromptError, match='jsonl:1: expected an object with a string "text", or'):
        load_prompts(path, chat=True)


def test_messages_without_chat_are_bad_input(tmp_path, folders, capsys):
    code, line = refused(capsys, run(tmp_path, folders["chat"], [{"messages": MESSAGES}])[0])
    assert code == 3
    assert 'prompts.jsonl:1: "messages" are read by hae-record --chat only' in line
