"""OpenAI's Responses: a chat whose turns are items, kept in the store, and if so asked answered in the background."""
