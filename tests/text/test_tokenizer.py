"""transformers' AutoTokenizer is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from alignedserve.text.tokenizer import Tokenizer
from tests.text.tokenizers_for_tests import (
    CHATML,
    LLAMA3,
    WRITERS,
    byte_level_json,
    write,
    write_llama2,
    write_llama3,
    write_opt,
    write_qwen,
)

TEXTS = [
    "",
    " ",
    "the quick brown fox",
    "  two  spaces and a tail ",
    "naïve café, e\u0301 你好 🙂👩‍👩‍👧",
    "unknown: Ωж한 \u200b\ufffd",
    "line\nline\r\n\ttab",
    "special <|eot_id|> <s> </s> <|im_end|> <think> <pad> inside",
    "é spelled out",
]
CHAT = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Hello <|eot_id|> there"},
    {"role": "assistant", "content": "Hi & <b>bye</b> 🙂"},
    {"role": "user", "content": "again"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<é & '\">", "parameters": {}}}]


@pytest.fixture(params=WRITERS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path)


def test_encodes_and_decodes_as_transformers(directory: Path) -> None:
    tokenizer, oracle = Tokenizer.from_directory(directory), auto(directory)
    assert tokenizer.eos_token_id == oracle.eos_token_id
    assert tokenizer.vocab_size == 1 + max(oracle.get_vocab().values())
    for text in TEXTS:
        for add in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add)
            assert ids == oracle.encode(text, add_special_tokens=add), text
            for skip in (True, False):
                expected = oracle.decode(ids, skip_special_tokens=skip)
                assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    every_id = list(range(tokenizer.vocab_size + 3))
    assert tokenizer.decode(every_id) == oracle.decode(every_id, skip_special_tokens=True)


def auto(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "flags",
    [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}, {"add_bos_token": None}],
)
def test_what_encode_adds(tmp_path: Path, flags: dict[str, bool]) -> None:
    """For tokenizer.json by its own post-processor alone, for vocab.json by the flags."""
    for writer in (write_llama2, write_qwen, write_opt):
        directory = tmp_path / writer.__name__
        directory.mkdir()
        writer(directory, **flags)
        assert Tokenizer.from_directory(directory).encode("fox") == auto(directory).encode("fox")


def test_opt_begins_every_text_with_its_end_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_opt(tmp_path))
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("the fox")[0] == 2
    assert tokenizer.encode("the fox")[1:] == tokenizer.encode("the fox", add_special_tokens=False)


def test_special_tokens_map_speaks_where_the_config_is_old(tmp_path: Path) -> None:
    write_llama3(tmp_path, eos_token=None)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|eot_id|>"}}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.eos_token_id == auto(tmp_path).eos_token_id is not None
    write_llama3(tmp_path, eos_token=None, added_tokens_decoder={})
    assert Tokenizer.from_directory(tmp_path).eos_token_id is None


def test_tokens_that_only_the_config_has_are_added(tmp_path: Path) -> None:
    size = Tokenizer.from_directory(write_llama3(tmp_path)).vocab_size
    added = {"content": "<|late|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    write_llama3(tmp_path, added_tokens_decoder={str(size): added})
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("the <|late|> fox")
    assert size in ids and ids == auto(tmp_path).encode("the <|late|> fox")
    assert size in tokenizer.special_ids
    write_llama3(tmp_path, added_tokens_decoder={"7": added})
    with pytest.raises(ValueError, match=r"added_tokens_decoder gives '<\|late\|>' the id 7; must be"):
        Tokenizer.from_directory(tmp_path)


def test_truncation_saved_in_the_file_is_not_applied(tmp_path: Path) -> None:
    content = json.loads(byte_level_json(("</s>",), has_bos=False))
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    write(tmp_path, json.dumps(content), {})
    assert len(Tokenizer.from_directory(tmp_path).encode("the quick brown fox jumps")) > 2


@pytest.mark.parametrize("writer", [write_llama3, write_qwen])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_chat_templates_render_as_in_transformers(
    tmp_path: Path, writer: Any, add_generation_prompt: bool, tools: Any, variables: dict[str, Any]
) -> None:
    tokenizer, oracle = Tokenizer.from_directory(writer(tmp_path)), auto(tmp_path)
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, "tools": tools, **variables}
    text = tokenizer.apply_chat_template(CHAT, **options)
    assert text == oracle.apply_chat_template(CHAT, tokenize=False, **options)
    expected = oracle.apply_chat_template(CHAT, tokenize=True, return_dict=False, **options)
    assert tokenizer.chat_ids(CHAT, parses_special_tokens=True, **options) == expected
    without = [message | {"content": message["content"].replace("<|eot_id|>", "")} for message in CHAT]
    expected = oracle.apply_chat_template(without, tokenize=True, return_dict=False, **options)
    assert tokenizer.chat_ids(without, **options) == expected


@pytest.mark.parametrize("writer", [write_llama3, write_qwen])
@pytest.mark.parametrize("content", ["It is", "a \n<|eot_id|> end", [{"type": "text", "text": "It is"}]])
def test_a_continued_message_renders_as_in_transformers(tmp_path: Path, writer: Any, content: Any) -> None:
    tokenizer, oracle = Tokenizer.from_directory(writer(tmp_path)), auto(tmp_path)
    chat = [*CHAT, {"role": "assistant", "content": content}]
    plain = content if isinstance(content, str) else content[0]["text"]
    expected = oracle.apply_chat_template(
        [*CHAT, {"role": "assistant", "content": plain}], tokenize=False, continue_final_message=True
    )
    assert expected.endswith(plain)
    for parses in (True, False):
        found = tokenizer.render_chat(chat, parses_special_tokens=parses, continue_final_message=True)
        assert found.text == expected
    ids = tokenizer.chat_ids(chat, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    # What ends a turn is no part of it, also where the turn is empty or its text recurs there.
    for text in ("", "im_end", "<|im_end|>"):
        chat[-1] = {"role": "assistant", "content": text}
        found = tokenizer.render_chat(chat, continue_final_message=True)
        assert found.text == expected.removesuffix(plain) + text


@pytest.mark.parametrize(
    ("template", "last", "reason"),
    [
        ("{{ messages[0].content }}", "x", "can't continue the last one"),
        ("{{ messages[-1].content * 2 }}", "x", "can't continue the last one"),
        ("{{ messages[-1].content | upper }}", "x", "can't continue the last one"),
        ("{{ messages[-1].content }}", None, "no text that could be continued"),
        ("{{ messages[-1].content }}", [], "no text that could be continued"),
    ],
)
def test_a_message_that_can_not_be_continued_is_refused(
    tmp_path: Path, template: str, last: Any, reason: str
) -> None:
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match=reason):
        tokenizer.render_chat([*CHAT, {"role": "assistant", "content": last}], continue_final_message=True)


def test_an_absent_content_reads_as_a_missing_key(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path))
    chat = [{"role": "user", "content": None, "tool_calls": None}]
    assert tokenizer.apply_chat_template(chat) == auto(tmp_path).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_content_in_parts_is_their_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path))
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": parts}])
    assert text == tokenizer.apply_chat_template([{"role": "user", "content": "one\ntwo"}])
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    with pytest.raises(
        ValueError, match="part of type 'image_url' is not supported: the model takes text only"
    ):
        tokenizer.apply_chat_template([{"role": "user", "content": image}])


CALLS = [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": {}}}]
QUESTION = {"role": "user", "content": "When?"}


@pytest.mark.parametrize("turn", [{"content": None}, {}])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        # one that looks whether there is a content, one that tests for None, and one that needs a text
        ("{% if m.content is defined %}{{ m.content }}{% else %}calls{% endif %}", "calls"),
        ("{% if m['content'] is none %}calls{% else %}{{ m['content'] + '!' }}{% endif %}", "calls"),
        ("{{ m['content'] + '!' }}", "!"),
    ],
)
def test_a_turn_without_content_fits_every_template(
    tmp_path: Path, turn: dict[str, Any], template: str, text: str
) -> None:
    source = "{% for m in messages %}{% if m.role == 'assistant' %}" + template + "{% endif %}{% endfor %}"
    write_qwen(tmp_path, chat_template=source)
    messages = [QUESTION, {"role": "assistant", "tool_calls": CALLS, **turn}]
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(messages) == text


def test_a_template_in_its_own_file_goes_first(tmp_path: Path) -> None:
    write_qwen(tmp_path, chat_template="in the config")
    (tmp_path / "chat_template.jinja").write_text("in the file {{ messages[0].content }}")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.apply_chat_template(CHAT[1:]) == "in the file Hello <|eot_id|> there"


def test_named_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": LLAMA3}, {"name": "tool_use", "template": CHATML}]
    tokenizer = Tokenizer.from_directory(write_llama3(tmp_path, chat_template=templates))
    oracle = auto(tmp_path)
    for tools in (None, TOOLS):
        expected = oracle.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert tokenizer.apply_chat_template(CHAT, tools=tools, add_generation_prompt=False) == expected
    write_llama3(tmp_path, chat_template=templates[1:])
    with pytest.raises(ValueError, match="has the chat templates tool_use; must have one named default"):
        Tokenizer.from_directory(tmp_path).apply_chat_template(CHAT)


def test_the_generation_block_is_its_content(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% generation %}{{ m.content }};{% endgeneration %}{% endfor %}"
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path, chat_template=template))
    assert tokenizer.apply_chat_template(CHAT) == auto(tmp_path).apply_chat_template(CHAT, tokenize=False)


def test_strftime_now(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path, chat_template="{{ strftime_now('%Y') }}"))
    assert len(tokenizer.apply_chat_template(CHAT)) == 4


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{% set _ = messages.append(1) %}"])
def test_templates_are_kept_in_the_sandbox(tmp_path: Path, attack: str) -> None:
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path, chat_template=attack))
    with pytest.raises(ValueError, match=r"the chat template rejects these messages: .*unsafe"):
        tokenizer.apply_chat_template(CHAT)


def test_a_directory_without_a_tokenizer_is_named_with_the_files_looked_for(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    expected = rf"{tmp_path} holds no tokenizer; looked for tokenizer\.json, or vocab\.json with merges\.txt"
    with pytest.raises(ValueError, match=expected):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("files", [{"tokenizer.json": "{}"}, {"vocab.json": "[", "merges.txt": "x"}])
def test_a_broken_tokenizer_is_named(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path}: its tokenizer cannot be read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 7}, "eos_token is 7; must be a string or an object with content"),
        ({"chat_template": 7}, "chat_template is 7; must be a string, or a list"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder is \{.*'x'"),
        ({"added_tokens_decoder": {"5": {}}}, r"added_tokens_decoder is \{.*'5'"),
        ({"chat_template": [{"name": "default"}]}, "chat_template is .* must be a string, or a list"),
    ],
)
def test_a_broken_config_is_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_llama3(tmp_path, **config)
    with pytest.raises(ValueError, match=message) as error:
        Tokenizer.from_directory(tmp_path)
    assert "tokenizer_config.json" in str(error.value)


def test_a_broken_flag_is_named(tmp_path: Path) -> None:
    write_opt(tmp_path, add_bos_token="yes")
    with pytest.raises(ValueError, match="add_bos_token is 'yes'; must be true or false"):
        Tokenizer.from_directory(tmp_path)


def test_no_chat_template_is_an_error_that_names_where_it_was_looked_for(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_llama2(tmp_path))
    with pytest.raises(
        ValueError, match=rf"{tmp_path} has no chat template; looked for chat_template\.jinja and"
    ):
        tokenizer.apply_chat_template(CHAT)


def test_what_a_template_raises_is_reported(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_llama3(tmp_path))
    with pytest.raises(
        ValueError, match=rf"{tmp_path}: the chat template rejects these messages: bad role tool"
    ):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path))
    with pytest.raises(ValueError, match=r"messages\[0\].content: must be a string or list"):
        tokenizer.apply_chat_template([{"role": "user", "content": {"type": "image"}}])
    tokenizer = Tokenizer.from_directory(write_qwen(tmp_path, chat_template="{{ 'x' + 5 }}"))
    with pytest.raises(ValueError, match="rejects these messages: can only concatenate str"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "template", ["{% if %}", "{% for x in y %}" * 30 + "{% endfor %}" * 30, "{{" + "(" * 5000]
)
def test_a_template_that_is_not_jinja_is_reported(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer.from_directory(write_llama3(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match="the chat template is not valid Jinja"):
        tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize("messages", [[], "hello", ["hello"], [{"content": "x"}], [{"role": 3}]])
def test_messages_must_be_objects_with_a_role(tmp_path: Path, messages: Any) -> None:
    tokenizer = Tokenizer.from_directory(write_llama3(tmp_path))
    with pytest.raises(ValueError, match=r"messages .* must be"):
        tokenizer.apply_chat_template(messages)


def test_half_a_character_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="text: must be a string without lone surrogates"):
        Tokenizer.from_directory(write_llama3(tmp_path)).encode("\ud83d")


# ---- what strangers put into a tokenizer ----


def write_with_pattern(directory: Path, pattern: str) -> Path:
    content = json.loads(byte_level_json(("<|im_start|>",), False))
    splits = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [splits, content["pre_tokenizer"]]}
    return write(directory, json.dumps(content), {})


def test_a_panic_is_an_error_of_one_line(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_with_pattern(tmp_path, "(x+x+)+y"))
    with pytest.raises(ValueError, match=r"^the model's tokenizer failed: .*retry-limit[^\n]*$"):
        tokenizer.encode("x" * 200)
    assert tokenizer.decode(tokenizer.encode("words")) == "words"
