"""Tokens of models that want more than a text between two marks: ColBERT's queries and documents, adapters that a text
chooses, and the chat in which a language model is asked whether a document answers a query."""

from __future__ import annotations

from tokenizers import AddedToken, Encoding, Tokenizer

from appliance.core.families import images
from appliance.core.multivector import DOCUMENT, QUERY, Multivector
from appliance.core.problems import invalid
from appliance.drivers.modelfolder import Card, read_json
from appliance.engine.tokens import Text, TextInput, Tokens, validation

# What stands in a rendered chat where query and document will be; no tokenizer has such characters.
PLACES = ("\ue000query\ue000", "\ue000document\ue000")
MASKS = ("[MASK]", "<mask>")
NO_ADAPTER = -1


class MultivectorTokens(Tokens):
    """A text without a prompt name is a document."""

    def __init__(self, card: Card, own: Multivector, max_tokens: int, default_prompt_name: str | None) -> None:
        super().__init__(card, max_tokens, None)
        self.own, self.default_role = own, default_prompt_name or DOCUMENT
        register(self.tokenizer, own)
        self.filler = filler_of(self.tokenizer, own)
        for tokens in (len(self.run(self.tokenizer, self.prompts.get(role) or "a")) for role in (QUERY, DOCUMENT)):
            if tokens > max_tokens:
                raise invalid(f"The mark of queries or documents has {tokens} tokens, and the limit is {max_tokens}")

    def is_query(self, prompt_name: str | None) -> bool:
        return (prompt_name or self.default_role) == QUERY

    def ready(self, given: TextInput) -> Text:
        if not given.text or isinstance(given.text, tuple):
            raise validation("`inputs` cannot be empty, or a pair")
        return super().ready(given)

    def most(self, given: TextInput) -> int:
        query = self.is_query(given.prompt_name)
        most = self.own.lengths.get(QUERY if query else DOCUMENT, self.max_tokens)
        if query and (expansion := self.own.expansion):
            most = expansion.length if expansion.fixed else max(most, expansion.length)
        return min(most, self.max_tokens)

    def fitted(self, encoding: Encoding, given: TextInput) -> Encoding:
        """A query is filled up; its further tokens have an attention mask of 0."""
        encoding = super().fitted(encoding, given)
        expansion = self.own.expansion if self.is_query(given.prompt_name) else None
        if expansion and len(encoding) < (length := min(expansion.length, self.max_tokens)):
            token = self.tokenizer.id_to_token(self.filler)
            encoding.pad(length, direction="right", pad_id=self.filler, pad_type_id=0, pad_token=token)
        return encoding

    def prompted(self, text: Text, prompt_name: str | None) -> Text:
        return super().prompted(text, prompt_name or self.default_role)


def register(tokenizer: Tokenizer, own: Multivector) -> None:
    """Make each mark that the vocabulary knows one token wherever it stands, as in training: a tokenizer would cut
    `[unused0]` into pieces, and one that lowers letters would never see `[Q] `."""
    for marker in own.markers:
        known = next((name for name in (marker, marker.strip()) if tokenizer.token_to_id(name) is not None), None)
        if known and tokenizer.encode(known, add_special_tokens=False).tokens != [known]:
            tokenizer.add_special_tokens([AddedToken(known, normalized=False, special=True)])


def filler_of(tokenizer: Tokenizer, own: Multivector) -> int:
    """The id of the token that fills queries up. Raises: Problem when the tokenizer has none."""
    if own.expansion is None:
        return 0
    names = [own.expansion.token] if own.expansion.token else [*MASKS, "</s>", "<|endoftext|>", "<eos>"]
    known = (tokenizer.token_to_id(name) for name in names)
    found = next((number for number in known if number is not None), None)
    if found is None:
        raise invalid(f"The tokenizer has none of {', '.join(names)}, with which queries are filled up")
    return found


class AdaptedEncoding:
    """The tokens of a text, and the number of the adapter that it chose."""

    def __init__(self, encoding: Encoding, adapter: int) -> None:
        self.ids, self.type_ids, self.attention_mask = encoding.ids, encoding.type_ids, encoding.attention_mask
        self.adapter = adapter

    def __len__(self) -> int:
        return len(self.ids)


class AdapterTokens(Tokens):
    """The name of a prompt is that of an adapter, too. default_prompt_name: for texts that name none."""

    def __init__(self, card: Card, max_tokens: int, default_prompt: str | None, default_name: str | None) -> None:
        super().__init__(card, max_tokens, default_prompt)
        self.adapters, self.default_name = card.adapters, default_name

    def fitted(self, encoding: Encoding, given: TextInput) -> AdaptedEncoding:
        encoding = super().fitted(encoding, given)
        name = given.prompt_name or self.default_name
        return AdaptedEncoding(encoding, self.adapters.index(name) if name in self.adapters else NO_ADAPTER)


class FilledTokens(Tokens):
    """SigLIP's texts, which are filled up to their full length; the model sees what they are filled with."""

    def __init__(self, card: Card, max_tokens: int, default_prompt: str | None) -> None:
        super().__init__(card, max_tokens, default_prompt)
        self.filler = padding_of(card, self.tokenizer)

    def fitted(self, encoding: Encoding, given: TextInput) -> Encoding:
        encoding = super().fitted(encoding, given)
        token = self.tokenizer.id_to_token(self.filler)
        encoding.pad(self.max_tokens, direction="right", pad_id=self.filler, pad_type_id=0, pad_token=token)
        return encoding


def padding_of(card: Card, tokenizer: Tokenizer) -> int:
    """The id of the tokenizer's own padding, which SigLIP 2's text_config does not name; else that of text_config."""
    named = (read_json(card.folder / "tokenizer_config.json") or {}).get("pad_token")
    name = named.get("content") if isinstance(named, dict) else named
    number = tokenizer.token_to_id(name) if isinstance(name, str) else None
    if number is None:
        number = images.text_config(card.config).get("pad_token_id", 1)
    if tokenizer.id_to_token(number) is None:
        raise invalid(f"The tokenizer has no token {number}, with which texts are filled up")
    return int(number)


class ChatTokens(Tokens):
    """A pair is put into the chat that the model was trained to answer; a document that is too long is cut."""

    def __init__(self, card: Card, max_tokens: int, default_prompt: str | None) -> None:
        super().__init__(card, max_tokens, None)
        self.parts = chat_parts(str(card.chat_template), default_prompt or card.instruction)
        if (fixed := len(self.run(self.tokenizer, "".join(self.parts)))) >= max_tokens:
            raise invalid(f"The chat around query and document has {fixed} tokens, and the limit is {max_tokens}")

    def ready(self, given: TextInput) -> Text:
        if isinstance(given.text, str):  # as it stands, whatever a score of it is worth: TEI scores single texts, too
            return super().ready(given)
        return self.chat(*self.pair(given))

    def pair(self, given: TextInput) -> tuple[str, str]:
        """Query and document."""
        if not all(given.text):
            raise validation("`inputs` must be a query and a document, neither of them empty")
        text = self.within_characters(given.text, given.truncate, given.left)
        return text[0], text[1]

    def chat(self, query: str, document: str) -> str:
        before, between, after = self.parts
        return before + query + between + document + after

    def cutter_for(self, encoding: Encoding, given: TextInput) -> Tokenizer | None:
        """Of a chat the document is cut, and not the end."""
        return super().cutter_for(encoding, given) if isinstance(given.text, str) else None

    def fitted(self, encoding: Encoding, given: TextInput) -> Encoding:
        if isinstance(given.text, str):
            return super().fitted(encoding, given)
        query, document = self.pair(given)
        while (over := len(encoding) - self.max_tokens) > 0:
            if not given.truncate:
                raise validation(f"`inputs` must have less than {self.max_tokens} tokens. Given: {len(encoding)}")
            document = self.shortened(document, over, given.left)
            encoding = self.run(self.tokenizer, self.chat(query, document))
        return encoding

    def shortened(self, document: str, over: int, left: bool) -> str:
        """Without so many of its tokens, and at least one letter shorter: several tokens may be of one letter.

        Raises: Problem when nothing is left.
        """
        spans = self.run(self.tokenizer, document, special=False).offsets
        rest = ""
        if over < len(spans):
            rest = document[max(1, spans[over][0]) :] if left else document[: min(len(document) - 1, spans[-over][0])]
        if not rest:
            raise validation(f"the query leaves no room for a document among {self.max_tokens} tokens")
        return rest


def chat_parts(template: str, instruction: str | None) -> tuple[str, str, str]:
    """What stands before the query, between query and document, and behind. The template runs once, in a sandbox.

    Raises: Problem unless query and document stand once in it, in this order.
    """
    import jinja2  # only now: no other model needs it, and it takes 10 MB
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    system = [{"role": "system", "content": instruction}] if instruction else []
    roles = [{"role": role, "content": place} for role, place in zip((QUERY, DOCUMENT), PLACES, strict=True)]
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        text = sandbox.from_string(template).render(messages=system + roles, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise invalid(f"The chat template cannot be used: {error}", "UNSUPPORTED_MODEL") from error
    before, found, rest = text.partition(PLACES[0])
    between, found_too, after = rest.partition(PLACES[1])
    if not found or not found_too or any(place in before + between + after for place in PLACES):
        raise invalid(
            "The chat template has no place for a query and a document (messages with the roles query and document)",
            "UNSUPPORTED_MODEL",
        )
    return before, between, after
