#!/bin/sh
# Each task of the gateway with curl. The instance: TEI_MODEL, by default minilm.
set -e
gateway=${TEI_GATEWAY:-http://127.0.0.1:9002}
model=${TEI_MODEL:-minilm}
post() { curl -sS --fail-with-body -X POST "$gateway$1" -H 'Content-Type: application/json' -d "$2"; echo; }

post /v1/embeddings "{\"model\": \"$model\", \"input\": [\"hello world\", \"bonjour\"], \"encoding_format\": \"base64\"}"
post "/instances/$model/embed" '{"inputs": "hello world", "dimensions": 8}'
post "/instances/$model/similarity" '{"inputs": {"source_sentence": "hello", "sentences": ["hi there", "a fast car"]}}'
post "/instances/$model/tokenize" '{"inputs": "hello world"}'
post "/instances/$model/decode" '{"ids": [101, 7592, 2088, 102]}'
curl -sS --fail-with-body "$gateway/instances/$model/info"; echo
curl -sS --fail-with-body "$gateway/v1/models"; echo
