"""Talks to `dartspec serve` with OpenAI's own client: a chat, a stream, and the same text without speculation.

    dartspec serve &
    python examples/openai_client.py [http://127.0.0.1:8000/v1]

Needs `pip install openai`.
"""

from __future__ import annotations

import os
import sys

from openai import OpenAI

client = OpenAI(
    base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1",
    api_key=os.environ.get("DARTSPEC_API_KEY", "none"),
)
model = client.models.list().data[0].id
question = "Explain in two sentences why the sea has tides."

# one answer, and what speculation did for it
answer = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": question}], temperature=0.7, seed=1, max_tokens=80
)
print(answer.choices[0].message.content)
spent = answer.usage.model_extra["dartspec"]
print(
    f"\n{answer.usage.completion_tokens} tokens, {spent['M']:.2f} a round, {spent['tokens_per_s']:.1f} tokens/s; "
    f"{spent['accepted']} of {spent['drafted']} drafted tokens accepted by {spent['drafter']}\n"
)

# the same one as it is written, plainly: the same seed gives the same text
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": question}],
    temperature=0.7,
    seed=1,
    max_tokens=80,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"speculate": "off"},
)
text = ""
for chunk in stream:
    if chunk.choices:
        piece = chunk.choices[0].delta.content or ""
        text += piece
        print(piece, end="", flush=True)
    elif chunk.usage:
        print(f"\n\nplainly: {chunk.usage.model_extra['dartspec']['tokens_per_s']:.1f} tokens/s")
print("the same text" if text == answer.choices[0].message.content else "another text (bfloat16 may round apart)")
