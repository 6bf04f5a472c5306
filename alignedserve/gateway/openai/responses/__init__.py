"""OpenAI's Responses: chats with items as turns, stored, and answered in the background if so requested."""
