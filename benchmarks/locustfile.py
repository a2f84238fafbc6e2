"""Conversations for locust: each user sends a growing conversation and checks the answer.

locust -f benchmarks/locustfile.py --headless -u 8 -r 4 -t 30s --host http://127.0.0.1:8000
"""

import random

from locust import HttpUser, between, task  # type: ignore[import-not-found]

SYSTEM = "You answer questions about rivers, springs and rain, briefly. " * 10


class ConversationUser(HttpUser):
    """One client: conversations of up to six turns that share a system prompt."""

    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        self.messages = [{"role": "system", "content": SYSTEM}]

    @task  # type: ignore[untyped-decorator]
    def turn(self) -> None:
        """One more question in the conversation; a new conversation after six."""
        if len(self.messages) > 12:
            self.on_start()
        question = f"Question {random.randrange(1000)}: where does it begin?"
        self.messages.append({"role": "user", "content": question})
        body = {"messages": self.messages, "max_tokens": 16}
        with self.client.post(
            "/v1/chat/completions", json=body, catch_response=True
        ) as response:
            if response.status_code != 200:
                answer = response.text or f"no answer from {self.host}"
                response.failure(f"{response.status_code}: {answer}")
                return
            message = response.json()["choices"][0]["message"]
            self.messages.append({"role": "assistant", "content": message["content"] or ""})
