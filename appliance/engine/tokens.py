"""Text to tokens: the model's own tokenizer under TEI's rules for limits, truncation and prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from appliance.core.problems import Kind, Problem, invalid, quoted
from appliance.drivers.modelfolder import Card, read_json

APPENDING = ("Llama", "CodeLlama", "Gemma", "Cohere")  # how the classes of those tokenizers begin
GTE_QWEN2 = "modeling_qwen.Qwen2Model"
TEXTS = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
PLAIN: dict[str, Any] = {"type": "TemplateProcessing", "single": TEXTS[:1], "pair": TEXTS, "special_tokens": {}}
CHARACTERS_PER_TOKEN = 250  # TEI refuses or cuts inputs over this many characters for each token of the limit
Text = str | tuple[str, str]


class TextInput(NamedTuple):
    """A text or pair as a caller gives it. left: what is too long loses its beginning; None: the default prompt."""

    text: Text
    truncate: bool
    left: bool = False
    prompt_name: str | None = None


def validation(message: str) -> Problem:
    return invalid(f"Input validation error: {message}")


class Token(NamedTuple):
    """A token as Tokenize answers it. start, stop: its bytes in the text; None for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Tokens:
    """The tokenizer of one model. Thread-safe. max_tokens counts special tokens."""

    def __init__(self, card: Card, max_tokens: int, default_prompt: str | None) -> None:
        file = card.folder / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust side raises plain Exception
            raise invalid(f"Cannot read {file}: {error}") from error
        # tokenizer.json often sets a maximum length and a padding of its own (MiniLM: 128 and 128).
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        if end := end_token(card):
            self.tokenizer = ending_with(self.tokenizer, end)
        self.max_tokens = max_tokens
        self.prompts = card.prompts
        self.special_tokens = card.special_tokens
        self.default_prompt = default_prompt
        self.cutters: dict[tuple[str, int], Tokenizer] = {}
        self.lock = threading.Lock()

    def encode(self, text: Text, truncate: bool, left: bool = False, prompt_name: str | None = None) -> Any:
        """Tokens of one text or pair, special ones included: an Encoding, or what has its ids, types and mask.

        Raises: Problem (invalid) for an empty text, an unknown prompt, or a text over the limit without ``truncate``.
        """
        given = TextInput(text, truncate, left, prompt_name)
        ready = self.ready(given)
        encoding = self.run(self.tokenizer, ready, self.special_tokens)
        if cutter := self.cutter_for(encoding, given):
            encoding = self.run(cutter, ready, self.special_tokens)
        return self.fitted(encoding, given)

    def encode_all(self, given: Sequence[TextInput]) -> list[Any]:
        """What `encode` gives for each of them, or the Problem that it raises.

        Several are tokenized by one call, which leaves the interpreter to other threads; for a single one that costs
        more than it is worth.
        """
        if len(given) == 1:
            return [attempted(lambda: self.encode(*given[0]))]
        ready = [attempted(partial(self.ready, each)) for each in given]
        encoded = list(ready)
        self.encode_places(self.tokenizer, ready, encoded, [at for at, text in enumerate(ready) if is_made(text)])
        long: dict[Tokenizer, list[int]] = {}
        for at, encoding in enumerate(encoded):
            if is_made(encoding) and (cutter := self.cutter_for(encoding, given[at])):
                long.setdefault(cutter, []).append(at)
        for cutter, places in long.items():
            self.encode_places(cutter, ready, encoded, places)
        return [
            attempted(partial(self.fitted, encoding, each)) if is_made(encoding) else encoding
            for encoding, each in zip(encoded, given, strict=True)
        ]

    def encode_places(self, tokenizer: Tokenizer, texts: list[Text], encoded: list[Any], places: list[int]) -> None:
        """Put the tokens of the texts at these places there, or the Problem."""
        wanted = [texts[at] for at in places]
        try:
            with tokenizer_errors():
                made: list[Any] = tokenizer.encode_batch_fast(wanted, add_special_tokens=self.special_tokens)
        except Problem:  # of one of them, and none has its tokens
            made = [attempted(partial(self.run, tokenizer, text, self.special_tokens)) for text in wanted]
        for at, encoding in zip(places, made, strict=True):
            encoded[at] = encoding

    def ready(self, given: TextInput) -> Text:
        """The text as it goes to the tokenizer."""
        text = given.text
        if not text or (isinstance(text, tuple) and not any(text)):
            raise validation("`inputs` cannot be empty")
        return self.within_characters(self.prompted(text, given.prompt_name), given.truncate, given.left)

    def most(self, given: TextInput) -> int:
        """How many tokens the text may have."""
        return self.max_tokens

    def cutter_for(self, encoding: Encoding, given: TextInput) -> Tokenizer | None:
        """The tokenizer that makes at most so many tokens of the text, where it has more and shall be cut."""
        if not given.truncate or len(encoding) <= (most := self.most(given)):
            return None
        return self.cutter("left" if given.left else "right", most)

    def fitted(self, encoding: Encoding, given: TextInput) -> Any:
        """The tokens as they go to the model."""
        if not len(encoding):
            raise validation("`inputs` has no token that the model knows")
        if len(encoding) > (most := self.most(given)):
            raise validation(f"`inputs` must have less than {most} tokens. Given: {len(encoding)}")
        return encoding

    def prompted(self, text: Text, prompt_name: str | None) -> Text:
        if prompt_name is not None and prompt_name not in self.prompts:
            names = ", ".join(sorted(self.prompts)) or "none"
            raise validation(f"prompt {quoted(prompt_name)} is not one of the model's prompts: {names}")
        prompt = self.default_prompt if prompt_name is None else self.prompts[prompt_name]
        if not prompt:
            return text
        if isinstance(text, tuple):
            raise validation("a prompt cannot be put in front of a pair of texts")
        return prompt + text

    def within_characters(self, text: Text, truncate: bool, left: bool = False) -> Text:
        """Refuse or cut a text that is far too long before it is tokenized: ten million characters cost seconds.

        left: its end stays, where TEI cuts the end off all the same and then takes the tokens before that (1.9).
        """
        limit = CHARACTERS_PER_TOKEN * self.max_tokens
        length = len(text) if isinstance(text, str) else sum(map(len, text))
        if length <= limit:
            return text
        if not truncate:
            raise validation(f"`inputs` must have less than {limit} characters. Given: {length}")
        if isinstance(text, str):
            return kept(text, limit, left)
        return kept(text[0], limit // 2, left), kept(text[1], limit // 2, left)

    def cutter(self, side: str, most: int) -> Tokenizer:
        """A copy of the tokenizer that truncates: truncation is a setting of the whole tokenizer."""
        with self.lock:
            if (side, most) not in self.cutters:
                cutter = Tokenizer.from_str(self.tokenizer.to_str())
                cutter.enable_truncation(most, strategy="longest_first", direction=side)
                self.cutters[side, most] = cutter
            return self.cutters[side, most]

    def run(self, tokenizer: Tokenizer, text: Text, special: bool = True) -> Encoding:
        with tokenizer_errors():
            if isinstance(text, tuple):
                return tokenizer.encode(*text, add_special_tokens=special)
            return tokenizer.encode(text, add_special_tokens=special)

    def tokenize(self, text: str, special: bool, prompt_name: str | None) -> list[Token]:
        """The tokens of a text, never truncated."""
        if not text:
            raise validation("`inputs` cannot be empty")
        text = str(self.within_characters(self.prompted(text, prompt_name), truncate=False))
        encoding = self.run(self.tokenizer, text, special)
        # The tokenizer counts characters, TEI bytes.
        byte_at = [0]
        for character in text:
            byte_at.append(byte_at[-1] + len(character.encode("utf-8", "surrogatepass")))
        raw = text.encode("utf-8", "surrogatepass")
        marked = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
        return [
            Token(number, token, True, None, None)
            if is_special
            else text_token(number, raw, byte_at[begin], byte_at[end])
            for number, token, is_special, (begin, end) in marked
        ]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        """Raises: Problem that names the first id outside the vocabulary, which the tokenizer would drop silently."""
        for at, number in enumerate(ids):
            if self.tokenizer.id_to_token(number) is None:
                size = self.tokenizer.get_vocab_size(with_added_tokens=True)
                raise validation(f"`ids` has {number} at place {at}, which is not in the vocabulary of {size} tokens")
        with tokenizer_errors():
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special))


def is_made(value: Any) -> bool:
    """Of what `attempted` gives."""
    return not isinstance(value, Problem)


def attempted(make: Callable[[], Any]) -> Any:
    """What it gives, or the Problem that it raises, which keeps no frame of those that it went through alive."""
    try:
        return make()
    except Problem as problem:
        return problem.with_traceback(None)


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Raises: Problem for what the tokenizer cannot do."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the Rust side raises plain Exception, and for a panic what is none
        raise Problem(Kind.PRECONDITION, "TOKENIZER", f"tokenizer error {error}") from error


def end_token(card: Card) -> str | None:
    """What is appended to each text though tokenizer.json does not say so: of a decoder the last token is pooled.

    The tokenizers of Llama and Gemma do it in transformers where `add_eos_token` is set (4.57), as e5-mistral has it;
    that of gte-Qwen2 by code of its own, which TEI (1.9) knows by the name of its model.
    """
    about = read_json(card.folder / "tokenizer_config.json") or {}
    # A copy that was trained further names the repository of its code before it.
    code = str((card.config.get("auto_map") or {}).get("AutoModel"))
    if card.model_type == "qwen2" and code.rpartition("--")[2] == GTE_QWEN2:
        return "<|endoftext|>"
    end = about.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end
    adds = about.get("add_eos_token") is True and str(about.get("tokenizer_class")).startswith(APPENDING)
    return end if adds and isinstance(end, str) else None


def ending_with(tokenizer: Tokenizer, token: str) -> Tokenizer:
    """One that ends each text with this token, which it may do by itself. Raises: Problem where it lacks the token."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise invalid(f"tokenizer.json lacks the token {quoted(token)} with which texts of this model end")
    if tokenizer.encode("a").ids[-1] == number:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    before = content["post_processor"]
    parts = [before] if before else []
    if before and before["type"] == "Sequence":
        parts = before["processors"]
    # A template behind another one would take what that has made for a pair.
    own = next((part for part in parts if part["type"] == "TemplateProcessing"), None) or PLAIN
    pieces = {kind: [each for piece in own[kind] for each in followed(piece, token)] for kind in ("single", "pair")}
    special = {**own["special_tokens"], token: {"id": token, "ids": [number], "tokens": [token]}}
    template = {**own, **pieces, "special_tokens": special}
    others = [part for part in parts if part is not own]
    content["post_processor"] = {"type": "Sequence", "processors": [*others, template]}
    return Tokenizer.from_str(json.dumps(content))


def followed(piece: dict[str, Any], token: str) -> list[dict[str, Any]]:
    """Of a template: the token follows each text."""
    if "Sequence" not in piece:
        return [piece]
    return [piece, {"SpecialToken": {"id": token, "type_id": piece["Sequence"]["type_id"]}}]


def kept(text: str, most: int, left: bool) -> str:
    """At most so many letters of it; left: the last ones."""
    return text[-most:] if left else text[:most]


def text_token(number: int, raw: bytes, start: int, stop: int) -> Token:
    return Token(number, raw[start:stop].decode("utf-8", "replace"), False, start, stop)
