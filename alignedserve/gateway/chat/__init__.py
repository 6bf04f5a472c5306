"""Chats of any API: messages, tools and the tool choice, rendered by the model's chat template."""
