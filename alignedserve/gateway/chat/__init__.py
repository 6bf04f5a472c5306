"""Chats, whichever API they come by: messages, tools and a choice among them, put into the model's template."""
