"""Chats as blocks: which are in the prompt, what each is worth, who leaves and who comes back."""
