"""One request over two engines: the first computes the prompt, the second the answer.

engine serve examples/handover/prefill.yaml &
engine serve examples/handover/decode.yaml &
python examples/handover/ask.py "Why is the sky blue?"
"""

from __future__ import annotations

import sys
from typing import Any

import httpx

PREFILL, DECODE = "http://127.0.0.1:8101/v1/chat/completions", "http://127.0.0.1:8102/v1/chat/completions"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url, json=body, timeout=120)
    if response.status_code != 200:
        raise SystemExit(f"{url} answered {response.status_code}: {response.text}")
    return response.json()


def main() -> None:
    question = " ".join(sys.argv[1:]) or "What is the capital of France?"
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": question}], "temperature": 0}
    first = post(PREFILL, {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}})
    answer = post(DECODE, {**body, "max_tokens": 200, "kv_transfer_params": first["kv_transfer_params"]})
    print(answer["choices"][0]["message"]["content"])
    reused = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    print(f"({reused} of {answer['usage']['prompt_tokens']} prompt tokens came from the other engine)")


if __name__ == "__main__":
    main()
