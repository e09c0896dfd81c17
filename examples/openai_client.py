"""The OpenAI client against the gateway: nothing but the base URL changes. Needs `pip install openai`."""

import os

from openai import OpenAI

GATEWAY = os.environ.get("TEI_GATEWAY", "http://127.0.0.1:9002")
MODEL = os.environ.get("TEI_MODEL", "minilm")  # an instance's name, or the model id that it serves

client = OpenAI(base_url=f"{GATEWAY}/v1", api_key="not needed on loopback")
print("models:", [model.id for model in client.models.list()])

reply = client.embeddings.create(model=MODEL, input=["hello world", "bonjour le monde"])
for item in reply.data:
    print(item.index, len(item.embedding), [round(number, 4) for number in item.embedding[:3]])
print("tokens:", reply.usage.total_tokens)
