"""What the model of an instance does, as its folder says, or the listing of one that runs elsewhere: the task that
decides which routes fit, and its prompts."""

from __future__ import annotations

from appliance.core.state import Instance
from appliance.drivers.modelfolder import Card
from appliance.node.directory import Directory
from appliance.node.servable import card_of

EMBEDDING, SPARSE = frozenset({"embedding"}), frozenset({"sparse"})
RANKING, CLASSIFYING = frozenset({"reranker"}), frozenset({"classifier"})
MULTIVECTOR = frozenset({"multivector"})
MOST_KEPT = 1024
# What models call their prompts for a query and for what is searched; the last ones are jina-embeddings-v3's.
QUERY_PROMPTS = ("search_query", "query", "retrieval.query")
TEXT_PROMPTS = ("search_document", "document", "passage", "retrieval.passage")
# What clients call the purpose of texts, each with what models call their prompt for it.
CLASSIFYING_PROMPTS, GROUPING_PROMPTS = ("classification",), ("clustering", "separation")
COHERE_PURPOSES = {
    "image": (),
    "search_query": QUERY_PROMPTS,
    "search_document": TEXT_PROMPTS,
    "classification": CLASSIFYING_PROMPTS,
    "clustering": GROUPING_PROMPTS,
}
OPENAI_PURPOSES = {  # Voyage's and NVIDIA's; Jina's; and Cohere's, which proxies send on
    **dict.fromkeys(("query", "retrieval.query", "search_query"), QUERY_PROMPTS),
    **dict.fromkeys(("document", "passage", "retrieval.passage", "search_document"), TEXT_PROMPTS),
    "classification": CLASSIFYING_PROMPTS,
    **dict.fromkeys(("separation", "clustering"), GROUPING_PROMPTS),
    "text-matching": ("text-matching", "sts"),  # the second one is EmbeddingGemma's
}


class Cards:
    """The cards of instances, read once for each launch. Thread-safe."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.kept: dict[tuple[str, str, int, int], Card] = {}

    def of(self, instance: Instance) -> Card | None:
        key = (instance.name, instance.created_at, instance.launch, instance.generation)
        if key not in self.kept and (card := card_of(instance.spec)):
            if len(self.kept) >= MOST_KEPT:
                self.kept.clear()  # of instances that are long gone
            self.kept[key] = card
        return self.kept.get(key)

    def fits(self, instance: Instance, tasks: frozenset[str]) -> bool:
        return not tasks.isdisjoint(self.tasks(instance))

    def tasks(self, instance: Instance) -> frozenset[str]:
        """All that its model does; empty where that is not known."""
        listed = self.directory.content.listed.get(instance.name)
        if listed and listed.task:
            return frozenset({listed.task})
        card = self.of(instance)
        return card.tasks if card else frozenset()

    def prompt_name(self, instance: Instance, names: tuple[str, ...]) -> str | None:
        """The model's own spelling of the first of these names under which it has a prompt."""
        card = self.of(instance)
        by_name = {each.lower(): each for each in card.prompts} if card else {}
        return next((by_name[name] for name in names if name in by_name), None)
